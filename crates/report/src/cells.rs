//! A run of kind `experiment`: a table of its points, which all renderers use.
//!
//! [`Table::load`] is a function of the run directory alone; [`Comparison::of`] compares two
//! tables.

use std::path::{Path, PathBuf};

use fathom_run::{Run, RunKind};

mod answer;
mod beside;
mod bonnie;
mod cell;
mod compare;
mod confidence;
mod confirm;
pub mod csv;
mod curves;
mod effects;
pub mod html;
mod layers;
mod path;
mod points;
mod profile;
mod ranking;
mod sheet;
mod spread;
mod statistics;
mod table;
pub mod terminal;
mod time_line;
mod verdict;
mod words;

pub use cell::{Column, Row};
pub use compare::{Compared, Comparison, Difference, Pair};
pub use confidence::Confidence;
pub use curves::Knee;
pub use points::Settings;
pub use profile::{Sampled, Symbol};
pub use ranking::{Effect, Ranking};
pub use statistics::{ENOUGH, Interval, Rounds};
pub use table::{Figure, Point, Table};
pub use verdict::{FALSE_ALARMS, Ratio, Verdict};

/// Returns the run directory of an experiment's only cell, if that cell has one. The page of that
/// run shows more than a table of one row.
pub fn only_breakdown(dir: &Path, run: &Run) -> Option<PathBuf> {
    let cells = &run.experiment.as_ref()?.cells;
    match cells.as_slice() {
        [cell] if run.kind == RunKind::Experiment && cell.holds_run(dir) => Some(cell.folder(dir)),
        _ => None,
    }
}

/// Returns a [`Table`] or a [`Comparison`] as JSON (docs/report.md).
pub fn json<T: serde::Serialize>(said: &T) -> String {
    // Keys are strings and figures are finite, so serialization cannot fail.
    serde_json::to_string_pretty(said).unwrap_or_default() + "\n"
}
