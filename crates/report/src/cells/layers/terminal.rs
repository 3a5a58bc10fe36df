//! Layers on a terminal: a bar for each.

use super::{EXPLAINED, parts};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::terminal::page::{Bar, Page};
use crate::render::text::{duration, micros, percent, plural};

/// Maximum number of points shown.
const MOST_POINTS: usize = 4;

pub(in crate::cells) fn show(page: &mut Page, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, parts(point)?)));
    let with: Vec<_> = with.collect();
    for (point, (whole, parts)) in with.iter().take(MOST_POINTS) {
        let of = match point.settings.is_empty() {
            true => String::new(),
            false => format!(": {}", words::label(&point.settings)),
        };
        let whole = duration(*whole);
        page.heading(&format!(
            "Where a request of {whole} spends its time (us){of}"
        ));
        let means: Vec<Option<f64>> = parts.iter().map(|part| Some(part.ns)).collect();
        let bars = parts.iter().zip(micros(&means)).map(|(part, mean)| Bar {
            label: part.name.to_owned(),
            figures: vec![mean, percent(part.share)],
            length: part.ns,
        });
        page.bars(&bars.collect::<Vec<Bar>>());
    }
    if !with.is_empty() {
        page.note(EXPLAINED);
    }
    let left = with.len().saturating_sub(MOST_POINTS);
    if left > 0 {
        let more = plural(left as u64, "more point");
        page.note(&format!("And {more}, which --html shows."));
    }
}
