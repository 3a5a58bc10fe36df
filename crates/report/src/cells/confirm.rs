//! Results of the trials of a point's suspected limiter (`fathom lab run --confirm`).

use std::path::Path;

use fathom_limiter::{CPU_CAP, IO_CAP};
use fathom_run::{Better, Expects, Experiment, Trial};

use super::cell::{self, Column, Columns, Problems, Row};
use super::statistics::{Rounds, median, ratio, sorted};
use super::words;

/// Least gain that confirms a limiter whose resource the trial doubles.
const MORE: f64 = 1.15;
/// Greatest gain that confirms a limiter on the side of the load, whose demand the trial doubles.
const NO_MORE: f64 = 1.10;

/// A suspected limiter that was tried.
pub(super) struct Tried {
    pub(super) confirmed: bool,
    /// The change and its result, as text.
    pub(super) words: String,
}

/// Evaluates the trials of a point's cells for the point's suspected limiter. Returns `None` if
/// no trial has a result for the main measure.
pub(super) fn tried(
    dir: &Path,
    experiment: &Experiment,
    rows: &[Row],
    limiter: &str,
    main: &Column,
    problems: &mut Problems,
) -> Option<Tried> {
    let of = |trial: &Trial| {
        let id = cell::name(&trial.of);
        rows.iter().find(|row| row.id == id)
    };
    let mut gains = Rounds::new();
    let mut first = None;
    for trial in experiment
        .trials
        .iter()
        .filter(|one| one.limiter == limiter)
    {
        let Some(base) = of(trial) else { continue };
        let columns = &mut Columns::default();
        let row = cell::read(dir, &trial.planned, columns, problems);
        let Some((row, gain)) = row.and_then(|row| gain(&row, base, main).map(|gain| (row, gain)))
        else {
            continue;
        };
        gains.push((base.round, gain));
        first.get_or_insert_with(|| (trial.expects, changed(trial, &row, base)));
    }
    let gain = median(&sorted(gains.iter().map(|(_, gain)| *gain)))?;
    let (expects, changed) = first?;
    let confirmed = match expects {
        Expects::More => gain >= MORE,
        Expects::NoMore => gain <= NO_MORE,
    };
    let times = words::ratio(gain);
    let words = match (confirmed, expects) {
        (true, Expects::More) => format!("confirmed: {times} with {changed}"),
        (true, Expects::NoMore) => format!("confirmed: no gain with {changed} ({times})"),
        (false, Expects::More) => {
            format!("not confirmed: only {times} with {changed}")
        }
        (false, Expects::NoMore) => {
            format!("not confirmed: gain with {changed} ({times})")
        }
    };
    Some(Tried { confirmed, words })
}

fn gain(row: &Row, base: &Row, main: &Column) -> Option<f64> {
    let (after, before) = (
        row.measures.get(&main.name)?,
        base.measures.get(&main.name)?,
    );
    match main.better {
        Better::Lower => ratio(*before, *after),
        Better::Higher | Better::Neither => ratio(*after, *before),
    }
}

/// Returns what the trial changed, such as `iodepth=2`.
fn changed(trial: &Trial, row: &Row, base: &Row) -> String {
    if [CPU_CAP, IO_CAP].contains(&&*trial.limiter) {
        return "the limit lifted".into();
    }
    fathom_run::changed(&base.settings, &row.settings)
}
