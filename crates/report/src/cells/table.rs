//! The table of an experiment's run: its points by its measures.

use std::collections::BTreeMap;
use std::path::Path;

use fathom_limiter::Verdict;
use fathom_run::evidence::{Bare, LockWait};
use fathom_run::{
    Beside, Better, Environment, Error, Experiment, Planned, RequestPath, Run, RunKind, Sheet,
    Timeline, Unit,
};
use serde::Serialize;

use super::cell::{self, Column, Columns, Problems, Row, setting};
use super::confirm;
use super::curves::Knee;
use super::layers;
use super::path;
use super::points::{Points, Settings};
use super::profile::{self, Sampled};
use super::ranking::Ranking;
use super::statistics::{self, Interval, Rounds, ratio, sorted};
use super::time_line;
use super::verdict::{Ratio, Unjudged, judge};

/// Maximum number of characters of the reason why a run has ended.
const MOST_REASON: usize = 300;

/// A run of kind `experiment`, as the renderers show it. Values are in the units of their measures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// Origin of the run, always [`RunKind::Experiment`].
    pub kind: RunKind,
    /// Title of the run, for headings.
    pub title: String,
    /// Start time of the run in seconds since 1970.
    pub created: u64,
    /// Machines and versions of the programs.
    pub environment: Environment,
    /// The experiment's name.
    pub experiment: String,
    /// The requested number of rounds.
    pub rounds: u32,
    /// Seed of the order of the cells.
    pub seed: u64,
    /// Why the run has ended, if its number of rounds was chosen by the results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Parameters that are the same in all cells.
    pub parameters: Settings,
    /// Parameters that vary.
    pub axes: Vec<String>,
    /// Measures of the run, in the order in which the cells list them.
    pub measures: Vec<Column>,
    /// The measure that answers the experiment's question: the first for which more is better, else
    /// the first that can be better or worse.
    pub main: Option<String>,
    /// The layout of points side by side, if the experiment defines one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// The layout of measures in rows, if the experiment defines one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sheet: Option<Sheet>,
    /// Number of planned cells.
    pub planned: usize,
    /// The points. Ratios are to the first point; in a side-by-side layout, to the first of a row.
    pub points: Vec<Point>,
    /// Effects of settings on the main measure, on the 99th percentile of latency and on the CPU
    /// time of a request, if each point differs from the base in one setting.
    pub rankings: Vec<Ranking>,
    /// Knees of the main measure along a numeric axis.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub knees: Vec<Knee>,
    /// The cells that were run, by points.
    pub cells: Vec<Row>,
    /// IDs of the cells whose folders hold run directories.
    pub breakdowns: Vec<String>,
    /// Problems of the run and of its cells, one line each, in limited number.
    pub problems: Vec<String>,
}

/// The cells that differ only in their round.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// The values of the axes.
    pub settings: Settings,
    /// Words for these values in sentences, if the cells have them.
    #[serde(skip_serializing_if = "Settings::is_empty")]
    pub words: Settings,
    /// Number of planned cells.
    pub planned: usize,
    /// Number of completed cells.
    pub done: usize,
    /// Figures by the names of the measures.
    pub measures: BTreeMap<String, Figure>,
    /// The bare device's figure for the main measure.
    pub bare: Option<Figure>,
    /// Ratio of the main measure to the bare device's figure, by round.
    pub vs_bare: Option<Figure>,
    /// The suspected limiter, in a line.
    pub verdict: Option<String>,
    /// The rule of the suspected limiter, in a word.
    pub limiter: Option<String>,
    /// Whether trials confirmed the limiter; `verdict` says how. `None` if it was not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<bool>,
    /// CPU profiles of the sides, if the CPUs were sampled.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub profile: Vec<Sampled>,
    /// The time line of one of the point's cells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_line: Option<Timeline>,
    /// The functions through which requests reached their devices, in one of the point's cells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<RequestPath>,
    /// The kernel locks with the longest waits, of all rounds together.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locks: Vec<LockWait>,
    /// Mean time of a request in each layer in ns, over the rounds that have the layer.
    #[serde(skip)]
    pub(super) layers: Vec<(String, f64)>,
}

/// A measure of a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Values by round, sorted by round.
    pub rounds: Rounds,
    /// The median over rounds.
    pub median: f64,
    /// 95% interval from [`statistics::ENOUGH`] rounds on, else minimum to maximum; `None` with one
    /// round.
    pub interval: Option<Interval>,
    /// Ratio to the base, for measures that can be better or worse.
    pub ratio: Option<Ratio>,
}

impl Table {
    /// Reads an experiment's run, which may be unfinished. Damaged cells are listed in
    /// [`Table::problems`].
    ///
    /// # Errors
    /// Fails when `run.json` cannot be read, or does not describe an experiment.
    pub fn load(dir: &Path) -> fathom_run::Result<Table> {
        let run = Run::load(dir)?;
        let unusable = |problem| Error::Unusable {
            path: dir.to_owned(),
            problem,
        };
        match &run.experiment {
            Some(experiment) if run.kind == RunKind::Experiment => {
                let plan = Points::of(experiment).map_err(unusable)?;
                Ok(Table::of(dir, &run, experiment, &plan))
            }
            _ => Err(unusable("not the run of an experiment".into())),
        }
    }

    fn of(dir: &Path, run: &Run, experiment: &Experiment, plan: &Points) -> Table {
        let (mut columns, mut problems) = (Columns::default(), Problems::default());
        run.problems.iter().for_each(|line| problems.say(line));
        let mut read = |planned: &&Planned| cell::read(dir, planned, &mut columns, &mut problems);
        let cells = plan.cells.iter();
        let cells = cells.map(|cells| cells.iter().filter_map(&mut read).collect());
        let cells: Vec<Vec<Row>> = cells.collect();
        let main = main(&columns.list);
        let points = plan.cells.iter().zip(&cells);
        let points = points.map(|(planned, rows)| Point {
            settings: place(plan, planned),
            planned: planned.len(),
            profile: profile::load(dir, planned, rows, &mut problems),
            time_line: time_line::load(dir, planned, &mut problems),
            path: path::load(dir, planned, &mut problems),
            ..Point::of(rows, main)
        });
        let mut points: Vec<Point> = points.collect();
        let beside = experiment.beside.as_ref().map(|beside| &*beside.parameter);
        let beside = beside.filter(|name| plan.axes.contains(name));
        compare(&mut points, &columns.list, beside);
        for (point, rows) in points.iter_mut().zip(&cells) {
            if let (Some(limiter), Some(main)) = (&point.limiter, main)
                && let Some(tried) =
                    confirm::tried(dir, experiment, rows, limiter, main, &mut problems)
            {
                point.confirmed = Some(tried.confirmed);
                let verdict = point.verdict.get_or_insert_default();
                *verdict += &format!("; {}", tried.words);
            }
        }
        let axes: Vec<String> = plan.axes.iter().map(|axis| cell::name(axis)).collect();
        let holds_run = experiment.cells.iter().filter(|cell| cell.holds_run(dir));
        Table {
            kind: run.kind,
            title: cell::clipped(&run.title, 300),
            created: run.created,
            environment: run.environment.clone(),
            experiment: cell::name(&experiment.name),
            rounds: experiment.rounds,
            seed: experiment.seed,
            ended: { experiment.ended.as_ref() }.map(|why| cell::clipped(why, MOST_REASON)),
            parameters: plan.fixed.iter().map(setting).collect(),
            knees: Knee::all(&axes, &points, main),
            axes,
            rankings: Ranking::all(&points, &columns.list, main),
            main: main.map(|column| column.name.clone()),
            measures: columns.list,
            beside: experiment.beside.clone(),
            sheet: experiment.sheet.clone(),
            planned: experiment.cells.len(),
            points,
            cells: cells.into_iter().flatten().collect(),
            breakdowns: holds_run.map(|cell| cell::name(&cell.id)).collect(),
            problems: problems.finish(),
        }
    }

    /// Returns the column of the main measure.
    pub(super) fn main(&self) -> Option<&Column> {
        let main = self.main.as_ref()?;
        self.measures.iter().find(|column| column.name == *main)
    }
}

fn main(columns: &[Column]) -> Option<&Column> {
    let first = |is: fn(Better) -> bool| columns.iter().find(|column| is(column.better));
    first(|better| better == Better::Higher).or_else(|| first(|better| better != Better::Neither))
}

/// Returns a point's values of the axes, which are the same in all of its cells.
fn place(plan: &Points, cells: &[&Planned]) -> Settings {
    let settings = cells.first().map(|cell| &cell.settings);
    let axes = plan.axes.iter();
    let axes = axes.filter_map(|&name| Some(setting((name, settings?.get(name)?))));
    axes.collect()
}

impl Point {
    /// Creates a point from the measurements of its cells.
    fn of(rows: &[Row], main: Option<&Column>) -> Point {
        let mut measures: BTreeMap<&str, Rounds> = BTreeMap::new();
        let (mut bare, mut vs_bare) = (Rounds::new(), Rounds::new());
        for row in rows {
            for (name, value) in &row.measures {
                measures.entry(name).or_default().push((row.round, *value));
            }
            let Some(main) = main else { continue };
            let Some(device) = row.bare.as_ref().and_then(|bare| of_bare(main.unit, bare)) else {
                continue;
            };
            bare.push((row.round, device));
            let value = row.measures.get(&main.name);
            let ratio = value.and_then(|value| ratio(*value, device));
            vs_bare.extend(ratio.map(|ratio| (row.round, ratio)));
        }
        let (verdict, limiter) = verdict(rows).unzip();
        let figures = measures.into_iter();
        let figures =
            figures.filter_map(|(name, rounds)| Some((name.to_owned(), Figure::of(rounds)?)));
        Point {
            words: rows
                .first()
                .map_or_else(Settings::new, |row| row.words.clone()),
            done: rows.len(),
            measures: figures.collect(),
            bare: Figure::of(bare),
            vs_bare: Figure::of(vs_bare),
            verdict,
            limiter,
            locks: profile::locks(rows),
            layers: layers::of(rows),
            ..Point::default()
        }
    }
}

/// Returns the most frequent verdict of the rounds, the first of several equals, in a line and in a
/// word.
fn verdict(rows: &[Row]) -> Option<(String, String)> {
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| row.round);
    let verdicts: Vec<&Verdict> = rows.iter().filter_map(|row| row.verdict.as_ref()).collect();
    let same = |one: &Verdict| {
        verdicts
            .iter()
            .filter(|other| other.rule() == one.rule())
            .count()
    };
    let first = verdicts.iter().rev().max_by_key(|one| same(one))?;
    let line = match (same(first), verdicts.len()) {
        (count, all) if count == all => first.to_string(),
        (count, all) => format!("{first} (in {count} of {all} rounds)"),
    };
    Some((line, first.rule().unwrap_or("unknown").to_owned()))
}

impl Figure {
    fn of(mut rounds: Rounds) -> Option<Figure> {
        rounds.sort_by_key(|(round, _)| *round);
        rounds.dedup_by_key(|(round, _)| *round);
        let values = sorted(rounds.iter().map(|(_, value)| *value));
        Some(Figure {
            median: statistics::median(&values)?,
            interval: statistics::interval(&values),
            rounds,
            ratio: None,
        })
    }
}

/// Returns the bare device's figure that corresponds to a measure of this unit.
fn of_bare(unit: Unit, bare: &Bare) -> Option<f64> {
    let figure = match unit {
        Unit::PerSecond => bare.requests_per_second,
        Unit::MegabytesPerSecond => bare.bytes_per_second / 1e6,
        Unit::Nanoseconds => bare.mean_ns,
        _ => return None,
    };
    (figure > 0.0 && figure.is_finite()).then_some(figure)
}

/// Sets the ratios of every point to its base. The ratios of a measure are judged together.
fn compare(points: &mut [Point], columns: &[Column], beside: Option<&str>) {
    let bases = bases(points, beside);
    for column in { columns.iter() }.filter(|column| column.better != Better::Neither) {
        let compared = points.iter().zip(&bases).enumerate();
        let compared = compared.filter_map(|(at, (point, base))| {
            let of = point.measures.get(&column.name)?;
            let to = points[(*base)?].measures.get(&column.name)?;
            Some((at, Unjudged::paired(&of.rounds, &to.rounds)?))
        });
        let (places, family): (Vec<usize>, Vec<Unjudged>) = compared.unzip();
        for (at, ratio) in places.into_iter().zip(judge(family, column.better)) {
            if let Some(figure) = points[at].measures.get_mut(&column.name) {
                figure.ratio = Some(ratio);
            }
        }
    }
}

/// Returns the index of each point's base; `None` for a base. The base is the first point; in a
/// side-by-side layout, it is the first point that differs only in the layout's parameter.
fn bases(points: &[Point], beside: Option<&str>) -> Vec<Option<usize>> {
    let mut bases = BTreeMap::new();
    let base = |(at, point): (usize, &Point)| {
        let alike = beside.map(|parameter| {
            let mut others = point.settings.clone();
            others.remove(parameter);
            others
        });
        let base = *bases.entry(alike).or_insert(at);
        (base != at).then_some(base)
    };
    points.iter().enumerate().map(base).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_limiter::Limiter;

    fn row(round: u32, rule: Option<&'static str>) -> Row {
        Row {
            id: String::new(),
            round,
            settings: Settings::new(),
            words: Settings::new(),
            started: 0,
            seconds: 0.0,
            measures: BTreeMap::new(),
            bare: None,
            verdict: Some(Verdict {
                limiter: rule.map(|rule| Limiter {
                    rule,
                    subject: None,
                }),
                text: format!("round {round}"),
                also: Vec::new(),
            }),
            series: Vec::new(),
            locks: Vec::new(),
            layers: Vec::new(),
            load_part: None,
        }
    }

    #[test]
    fn a_points_verdict_is_that_of_most_rounds() {
        let said = |rules: &[Option<&'static str>]| {
            let rows = (1..).zip(rules).map(|(round, rule)| row(round, *rule));
            verdict(&rows.collect::<Vec<_>>()).unwrap().0
        };
        assert!(said(&[Some("thread"), Some("thread")]).ends_with("round 1"));
        let most = said(&[None, Some("thread"), Some("thread")]);
        assert!(most.ends_with("round 2 (in 2 of 3 rounds)"), "{most}");
        let first = said(&[Some("latency"), None]);
        assert!(first.ends_with("round 1 (in 1 of 2 rounds)"), "{first}");
        assert_eq!(verdict(&[]), None);
    }
}
