//! Time lines on a terminal.

use super::{Lane, end, heading};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::terminal::page::Page;
use crate::render::text::{self, duration, plural};

/// Maximum number of points shown.
const MOST_POINTS: usize = 4;
/// Width of a whole time line, in characters.
const BAR: f64 = 40.0;

pub(in crate::cells) fn show(page: &mut Page, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, point.time_line.as_ref()?)));
    let count = with.clone().count();
    for (point, told) in with.take(MOST_POINTS) {
        match point.settings.is_empty() {
            true => page.heading("Where the time goes"),
            false => page.heading(&format!(
                "Where the time goes: {}",
                words::label(&point.settings)
            )),
        }
        let scale = BAR / end(told).max(f64::MIN_POSITIVE);
        for lane in Lane::all(told) {
            let mut rows = text::Table::new(1, &[&heading(lane.name), "from", "took", ""]);
            for span in lane.longest() {
                let [begin, end] = [span.begin, span.end()].map(|at| (at * scale).round() as usize);
                let bar = "=".repeat((end - begin).max(1));
                rows.row([
                    span.name.clone(),
                    duration(span.begin * 1e9),
                    duration(span.seconds * 1e9),
                    format!(
                        "{:<width$}",
                        format!("{}{bar}", " ".repeat(begin)),
                        width = BAR as usize
                    ),
                ]);
            }
            page.table(&rows);
            page.gap();
        }
    }
    if count > MOST_POINTS {
        let more = plural((count - MOST_POINTS) as u64, "more point");
        page.note(&format!(
            "And the time lines of {more}, which --html shows."
        ));
    }
}
