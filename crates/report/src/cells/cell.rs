//! Reads cells. A run may come from a stranger, so names, columns and samples are limited.

use std::collections::BTreeMap;
use std::path::Path;

use fathom_limiter::Verdict;
use fathom_run::evidence::{Bare, Evidence, Layer, LockWait};
use fathom_run::{Better, Cell, Error, Measure, Planned, Series, Unit};
use serde::Serialize;

use super::points::Settings;

/// Maximum number of characters in a name or a value.
const MOST_NAME: usize = 100;
/// Maximum number of characters in a problem's line.
const MOST_LINE: usize = 500;
/// Maximum number of problem lines.
const MOST_LINES: usize = 20;
/// Maximum number of measures with different names in a run.
const MOST_MEASURES: usize = 200;
/// Maximum number of series of a cell.
const MOST_SERIES: usize = 32;
/// Maximum number of layers of a cell.
const MOST_LAYERS: usize = 32;
/// Maximum number of samples of a series; in a longer one, neighbours are averaged.
const MOST_SAMPLES: usize = 300;

/// A cell that was run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Id of the cell, which names its folder.
    pub id: String,
    /// Number of the round, from 1.
    pub round: u32,
    /// The values of all parameters.
    pub settings: Settings,
    /// Words for parameter values, for use in sentences.
    #[serde(skip_serializing_if = "Settings::is_empty")]
    pub words: Settings,
    /// Start time in seconds since 1970.
    pub started: u64,
    /// Duration in seconds, including everything around the measured window.
    pub seconds: f64,
    /// Values of the measures by name.
    pub measures: BTreeMap<String, f64>,
    /// The same work on the bare device.
    pub bare: Option<Bare>,
    /// The suspected limiter; None without evidence.
    pub verdict: Option<Verdict>,
    /// Measures over time, with a limited number of samples.
    pub series: Vec<Series>,
    /// Waits for locks.
    #[serde(skip)]
    pub(super) locks: Vec<LockWait>,
    /// Mean time of a request in each layer.
    #[serde(skip)]
    pub(super) layers: Vec<Layer>,
    /// Part of the measured window in which the load ran, of 1; None without evidence.
    #[serde(skip)]
    pub(super) load_part: Option<f64>,
}

/// A measure of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Name of the measure, such as `read.p99`.
    pub name: String,
    /// Unit of the measure's values.
    pub unit: Unit,
    /// Direction in which a change is an improvement.
    pub better: Better,
}

/// The measures of a run, in the order in which its cells list them.
#[derive(Default)]
pub(super) struct Columns {
    pub(super) list: Vec<Column>,
    places: BTreeMap<String, usize>,
}

/// Problems, without duplicates and limited in number.
#[derive(Default)]
pub(super) struct Problems {
    lines: Vec<String>,
    more: usize,
}

/// Reads a cell. Returns `None` if the cell was not run or is damaged.
pub(super) fn read(
    run: &Path,
    planned: &Planned,
    columns: &mut Columns,
    problems: &mut Problems,
) -> Option<Row> {
    let id = name(&planned.id);
    let cell = match Cell::load(run, planned) {
        Ok(cell) => cell?,
        Err(error) => {
            problems.say(format!("cell {id}: {}", without_path(&error)));
            return None;
        }
    };
    for problem in &cell.problems {
        problems.say(format!("cell {id}: {problem}"));
    }
    let mut measures = BTreeMap::new();
    for measure in &cell.measures {
        if let Some(name) = columns.take(measure, problems) {
            measures.entry(name).or_insert(measure.value);
        }
    }
    Some(Row {
        id,
        round: planned.round,
        settings: planned.settings.iter().map(setting).collect(),
        words: cell.words.iter().map(setting).collect(),
        started: cell.started,
        seconds: cell.seconds,
        measures,
        verdict: cell.evidence.as_ref().map(fathom_limiter::judge),
        bare: cell
            .evidence
            .as_ref()
            .and_then(|evidence| evidence.bare.clone()),
        layers: { cell.evidence.as_ref() }
            .map(|evidence| layers(&evidence.layers))
            .unwrap_or_default(),
        load_part: cell.evidence.as_ref().and_then(load_part),
        locks: cell
            .evidence
            .map(|evidence| evidence.locks)
            .unwrap_or_default(),
        series: cell.series.iter().take(MOST_SERIES).map(thinned).collect(),
    })
}

/// Limits the layers of a cell.
fn layers(all: &[Layer]) -> Vec<Layer> {
    let sound = all
        .iter()
        .filter(|one| one.mean_ns.is_finite() && one.mean_ns >= 0.0);
    sound
        .take(MOST_LAYERS)
        .map(|one| Layer {
            name: name(&one.name),
            mean_ns: one.mean_ns,
        })
        .collect()
}

fn load_part(evidence: &Evidence) -> Option<f64> {
    let part = evidence.load_seconds() / evidence.seconds;
    (part >= 0.0 && part.is_finite()).then_some(part)
}

impl Columns {
    /// Returns the name of the measure's column, and adds the column if needed. Returns `None` if
    /// the measure cannot have a column.
    fn take(&mut self, measure: &Measure, problems: &mut Problems) -> Option<String> {
        let name = name(&measure.name);
        if !measure.value.is_finite() {
            return None;
        }
        match self.places.get(&name).map(|&at| &self.list[at]) {
            Some(column) if column.unit == measure.unit => Some(name),
            Some(_) => {
                problems.say(format!("{name} has not the same unit in all cells"));
                None
            }
            None if self.list.len() == MOST_MEASURES => {
                problems.say(format!("more than {MOST_MEASURES} measures"));
                None
            }
            None => {
                self.places.insert(name.clone(), self.list.len());
                self.list.push(Column {
                    name: name.clone(),
                    unit: measure.unit,
                    better: measure.better,
                });
                Some(name)
            }
        }
    }
}

impl Problems {
    pub(super) fn say(&mut self, line: impl AsRef<str>) {
        let line = clipped(line.as_ref(), MOST_LINE);
        if self.lines.contains(&line) {
            return;
        }
        match self.lines.len() < MOST_LINES {
            true => self.lines.push(line),
            false => self.more += 1,
        }
    }

    pub(super) fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines
                .push(format!("and {} more of that kind", self.more));
        }
        self.lines
    }
}

/// Limits the lengths of a parameter's name and value.
pub(super) fn setting((key, value): (impl AsRef<str>, impl AsRef<str>)) -> (String, String) {
    (name(key.as_ref()), name(value.as_ref()))
}

pub(super) fn name(text: &str) -> String {
    clipped(text, MOST_NAME)
}

pub(super) fn clipped(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

/// Describes an error without its path: a run gives the same report wherever it is stored.
fn without_path(error: &Error) -> String {
    match error {
        Error::Io { source, .. } => source.to_string(),
        Error::Unusable { problem, .. } => problem.clone(),
    }
}

fn thinned(series: &Series) -> Series {
    let step = series.values.len().div_ceil(MOST_SAMPLES).max(1);
    let mean = |values: &[f64]| {
        let share = |value: &f64| value / values.len() as f64;
        values.iter().map(share).sum()
    };
    Series {
        name: name(&series.name),
        unit: series.unit,
        first: series.first + series.step * (step - 1) as f64,
        step: series.step * step as f64,
        values: series.values.chunks(step).map(mean).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_series_becomes_a_short_one_of_the_same_time() {
        let series = Series {
            name: "x".repeat(1000),
            unit: Unit::Percent,
            first: 0.5,
            step: 0.5,
            values: (0..1000).map(f64::from).collect(),
        };
        let thin = thinned(&series);
        assert_eq!((thin.first, thin.step), (2.0, 2.0));
        assert_eq!(
            (thin.values.len(), thin.values[0], thin.values[249]),
            (250, 1.5, 997.5)
        );
        assert_eq!(thin.name.len(), MOST_NAME + 2);
        let short = Series {
            name: "x".into(),
            values: vec![f64::MAX, f64::MAX],
            ..series
        };
        assert_eq!(thinned(&short), short);
    }

    #[test]
    fn problems_are_told_once_and_not_without_end() {
        let mut problems = Problems::default();
        for i in 0..1000 {
            problems.say(format!("{}", i / 2));
        }
        let told = problems.finish();
        assert_eq!(told.len(), MOST_LINES + 1);
        assert!(told[MOST_LINES].starts_with("and "), "{told:?}");
    }
}
