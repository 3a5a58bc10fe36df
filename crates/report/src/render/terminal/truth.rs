//! How reliable the breakdown is.

use super::page::Page;
use crate::analysis::{Exact, Truth};
use crate::render::facts;
use crate::render::text::{duration, plain, plural};

pub(super) fn show(page: &mut Page, exact: &Exact) {
    let truth = &exact.truth;
    page.heading("Reliability");
    page.fact("joined", &joined(truth));
    page.fact("clocks", &clocks(truth));
    page.fact("delivery", &facts::delivery(truth));
    if !truth.hosts.is_empty() {
        page.fact("host I/O", &facts::hosts(truth, plain));
    }
    if truth.lost.is_empty() {
        page.fact("lost", "no event was dropped");
        return;
    }
    page.fact("lost", &facts::lost(truth, plain));
    page.warning(
        "Events were dropped: p99, p99.9, max and the slowest requests are INVALID; means and \
         medians miss the dropped requests.",
    );
}

fn joined(truth: &Truth) -> String {
    let of = |count: u64, what: &str| {
        let share = count as f64 * 100.0 / truth.requests.max(1) as f64;
        format!("{count} {what} ({share:.2}%)")
    };
    format!(
        "{} of {}; {}, {}, {}; {}",
        truth.joined,
        plural(truth.requests, "request"),
        of(truth.unmatched, "unmatched"),
        of(truth.ambiguous, "ambiguous"),
        of(truth.incomplete, "incomplete"),
        match truth.inconsistent {
            0 => "no event contradicts the others".to_owned(),
            1 => "1 event contradicts the others".to_owned(),
            many => format!("{many} events contradict the others"),
        },
    )
}

fn clocks(truth: &Truth) -> String {
    let clocks = facts::clocks(truth, duration);
    let violations = plural(truth.violations, "violation");
    format!("{clocks}; {violations} of cause before effect")
}
