//! Tables of symbols on a terminal.

use fathom_run::evidence::LockWait;

use crate::cells::cell::clipped;
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::terminal::page::Page;
use crate::render::text::{self, plural};

/// Maximum number of points shown.
const MOST_POINTS: usize = 4;

pub(in crate::cells) fn show(page: &mut Page, table: &Table) {
    let sampled = table
        .points
        .iter()
        .filter(|point| !point.profile.is_empty());
    for point in sampled.clone().take(MOST_POINTS) {
        for side in &point.profile {
            page.heading(&format!("Where the CPU goes: {}", side.side));
            let samples = plural(side.samples, "sample");
            page.note(&format!("{}: {samples}", words::label(&point.settings)));
            let mut rows = text::Table::new(4, &["overhead", "command", "object", "symbol"]);
            for one in &side.top {
                rows.row([
                    format!("{:7.2}%", one.overhead),
                    clipped(&one.command, 22),
                    clipped(&one.object, 20),
                    clipped(&one.symbol, 36),
                ]);
            }
            page.table(&rows);
        }
        locks(page, &point.locks);
    }
    let left = sampled.count().saturating_sub(MOST_POINTS);
    if left > 0 {
        page.note(&format!(
            "and {}: --html has them.",
            plural(left as u64, "more point")
        ));
    }
}

fn locks(page: &mut Page, locks: &[LockWait]) {
    if locks.is_empty() {
        return;
    }
    page.heading("Waiting for the kernel's locks");
    let mut rows = text::Table::new(2, &["side", "lock and caller", "waits", "ms"]);
    for one in locks {
        rows.row([
            one.side.clone(),
            clipped(&one.name, 60),
            one.waits.to_string(),
            format!("{:.3}", one.seconds * 1e3),
        ]);
    }
    page.table(&rows);
}
