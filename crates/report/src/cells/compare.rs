//! Compares two runs of one experiment: B against A.

use std::collections::BTreeMap;

use fathom_run::Better;
use serde::Serialize;

use super::cell::Column;
use super::points::Settings;
use super::profile::Sampled;
use super::table::{Figure, Point, Table};
use super::verdict::{Ratio, Unjudged, Verdict, judge};
use super::words;
use crate::render::comparison::differing;
use crate::render::facts;
use crate::render::text::plural;

const RATIO: &str =
    "B/A is the ratio of the medians, with a 95% interval from 4 rounds of each run on";

/// Two runs, and their points with equal settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// A and B, each as (the user's name for the run, its table).
    pub runs: [(String, Table); 2],
    /// Differences in machines, and in parameters that vary in neither run.
    pub differences: Vec<Difference>,
    /// The measures that both runs have.
    pub measures: Vec<Column>,
    /// The points that both runs have, in A's order.
    pub points: Vec<Compared>,
}

/// A property that differs between A and B.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Name of the property or parameter.
    pub name: String,
    /// Values in A and in B.
    pub values: [String; 2],
}

/// A point that both runs have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The values of the parameters that vary in A or B.
    pub settings: Settings,
    /// Figures of A and B by the names of the measures.
    pub measures: BTreeMap<String, Pair>,
    /// The profiles of the CPUs in A and in B.
    #[serde(skip)]
    pub(super) profiles: [Vec<Sampled>; 2],
}

/// A measure of a point in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Figure of run A.
    pub a: Figure,
    /// Figure of run B.
    pub b: Figure,
    /// B/A, for measures that can be better or worse.
    pub ratio: Option<Ratio>,
}

impl Comparison {
    /// Compares run B with run A; each comes with the user's name for it.
    ///
    /// # Errors
    /// Returns a line of text when the runs are of different experiments.
    pub fn of(a: (String, Table), b: (String, Table)) -> Result<Comparison, String> {
        if a.1.experiment != b.1.experiment {
            return Err(format!(
                "{} is of the experiment {:?}, {} of {:?}: they cannot be compared",
                a.0, a.1.experiment, b.0, b.1.experiment
            ));
        }
        let both = |column: &&Column| {
            let mut others = b.1.measures.iter();
            others.any(|other| (&other.name, other.unit) == (&column.name, column.unit))
        };
        let measures: Vec<Column> = a.1.measures.iter().filter(both).cloned().collect();
        let axes: Vec<&String> = a.1.axes.iter().chain(&b.1.axes).collect();
        let mut of_b: BTreeMap<Settings, &Point> = BTreeMap::new();
        for point in &b.1.points {
            of_b.entry(place(&b.1, point, &axes)).or_insert(point);
        }
        let pair = |point: &Point| {
            let settings = place(&a.1, point, &axes);
            let other = of_b.get(&settings)?;
            Some(Compared {
                measures: pairs(&measures, point, other),
                profiles: [point, other].map(|point| point.profile.clone()),
                settings,
            })
        };
        let mut points: Vec<Compared> = a.1.points.iter().filter_map(pair).collect();
        compare(&mut points, &measures);
        Ok(Comparison {
            differences: differences(&a.1, &b.1, &axes),
            measures,
            points,
            runs: [a, b],
        })
    }

    /// Returns a line for each point about the measure that answers for it, with its verdict.
    pub(super) fn verdicts(&self) -> Vec<String> {
        let line = |point: &Compared| {
            let main = self.main_of(point)?;
            let ratio = point.measures.get(&main.name)?.ratio.as_ref()?;
            let what = words::verdict(ratio.verdict, main);
            let what = match ratio.verdict {
                Verdict::NotEnoughRounds { .. } => format!("{what} of each run"),
                _ => what,
            };
            let interval = words::ratio_interval(ratio.interval);
            let ratio = match interval.is_empty() {
                true => words::ratio(ratio.median),
                false => format!("{} ({interval})", words::ratio(ratio.median)),
            };
            let place = match point.settings.is_empty() {
                true => String::new(),
                false => format!("{}: ", words::label(&point.settings)),
            };
            Some(format!(
                "{place}{} of B is {ratio} that of A: {what}.",
                main.name
            ))
        };
        let lines = self.points.iter().filter_map(line);
        lines.take(words::MOST_ROWS).collect()
    }

    /// Returns the measure that answers for a point: the main one of run A, else the first of the
    /// point's own that can be better, for points of another test.
    pub(super) fn main_of(&self, point: &Compared) -> Option<&Column> {
        let has = |column: &&Column| point.measures.contains_key(&column.name);
        let first = |is: fn(Better) -> bool| {
            let mut all = self.measures.iter().filter(has);
            all.find(|column| is(column.better))
        };
        { self.runs[0].1.main().filter(has) }
            .or_else(|| first(|better| better == Better::Higher))
            .or_else(|| first(|better| better == Better::Lower))
    }

    /// Returns notes that explain the figures and count the points without a counterpart.
    pub(super) fn explained(&self) -> Vec<String> {
        let pairs = || self.points.iter().flat_map(|point| point.measures.values());
        let most = pairs()
            .map(|pair| pair.a.rounds.len().min(pair.b.rounds.len()))
            .max();
        let mut lines = vec![words::rounds_explained(most.unwrap_or(0))];
        if pairs().any(|pair| pair.ratio.is_some()) {
            lines.push(words::verdicts_explained(RATIO));
        }
        for (letter, (_, table)) in ["A", "B"].into_iter().zip(&self.runs) {
            let alone = table.points.len().saturating_sub(self.points.len());
            if alone > 0 {
                let points = plural(alone as u64, "point");
                lines.push(format!("{points} of {letter} without a counterpart."));
            }
        }
        lines
    }
}

/// Returns a point's values of these parameters, whether they vary in its own run or not.
fn place(table: &Table, point: &Point, axes: &[&String]) -> Settings {
    let value = |name: &&String| {
        let name = name.as_str();
        let value = point
            .settings
            .get(name)
            .or_else(|| table.parameters.get(name))?;
        Some((name.to_owned(), value.clone()))
    };
    axes.iter().filter_map(value).collect()
}

fn pairs(measures: &[Column], a: &Point, b: &Point) -> BTreeMap<String, Pair> {
    let pair = |column: &Column| {
        let (a, b) = (a.measures.get(&column.name)?, b.measures.get(&column.name)?);
        let without = |figure: &Figure| Figure {
            ratio: None, // it relates to the base of its own run
            ..figure.clone()
        };
        let pair = Pair {
            a: without(a),
            b: without(b),
            ratio: None,
        };
        Some((column.name.clone(), pair))
    };
    measures.iter().filter_map(pair).collect()
}

/// Sets the ratios. The ratios of a measure are judged together.
fn compare(points: &mut [Compared], columns: &[Column]) {
    for column in { columns.iter() }.filter(|column| column.better != Better::Neither) {
        let compared = points.iter().enumerate().filter_map(|(at, point)| {
            let pair = point.measures.get(&column.name)?;
            Some((at, Unjudged::unpaired(&pair.b.rounds, &pair.a.rounds)?))
        });
        let (places, family): (Vec<usize>, Vec<Unjudged>) = compared.unzip();
        for (at, ratio) in places.into_iter().zip(judge(family, column.better)) {
            if let Some(pair) = points[at].measures.get_mut(&column.name) {
                pair.ratio = Some(ratio);
            }
        }
    }
}

fn differences(a: &Table, b: &Table, axes: &[&String]) -> Vec<Difference> {
    let facts = |table: &Table| -> Vec<(String, String)> {
        let machines = facts::machines(&table.environment).into_iter();
        let machines = machines.map(|(name, words)| (name.to_owned(), words));
        let fixed = table
            .parameters
            .iter()
            .filter(|(name, _)| !axes.contains(name));
        machines
            .chain(fixed.map(|(name, value)| (name.clone(), value.clone())))
            .collect()
    };
    let all = differing(&[facts(a), facts(b)]).into_iter();
    all.filter_map(|(name, values)| {
        let values = values.try_into().ok()?;
        Some(Difference { name, values })
    })
    .collect()
}
