//! Sums that cannot be right: figures that contradict each other.

use super::text::duration;
use crate::analysis::{Analysis, Exact};

/// Most by which a figure may exceed the whole that contains it: rows of different rounds differ.
const DIFFERENCE: f64 = 1.10;
/// Most by which the sum of all layers may differ from the total, for rounding.
const ROUNDING: f64 = 0.01;

/// Returns an error for each impossible sum: a part of a request that takes longer than the whole
/// request, and layers that do not add up to the total.
pub(crate) fn sums(run: &Analysis) -> Vec<String> {
    let Some(exact) = run.exact.as_ref().filter(|exact| exact.total.count > 0) else {
        return Vec::new();
    };
    let mut errors: Vec<String> = layers(exact).into_iter().collect();
    let rows = run.wiki.iter().flat_map(|wiki| &wiki.cumulative);
    // A benchmark's own mean is not a part of the requests that were followed.
    let parts = rows.filter(|(name, ..)| !name.ends_with(" benchmark"));
    // The benchmark's mean is of the same rounds as the row.
    let with_whole =
        parts.map(|(name, ns, control)| (name, *ns, control.unwrap_or(exact.total.mean)));
    let longer = with_whole.filter(|(_, ns, whole)| *ns > whole * DIFFERENCE);
    errors.extend(longer.map(|(name, ns, whole)| {
        format!(
            "Impossible sum: '{name}' takes {} of a request that takes {} in all; the two are of \
             different requests, and must not be compared.",
            duration(ns),
            duration(whole)
        )
    }));
    errors
}

fn layers(exact: &Exact) -> Option<String> {
    let sum: f64 = exact.layers.iter().map(|row| row.time.mean).sum();
    let whole = exact.total.mean;
    let differs = (sum - whole).abs() > whole.abs() * ROUNDING + 1.0;
    differs.then(|| {
        format!(
            "Impossible sum: the layers take {} together, and the whole request {}; the table of \
             layers must not be used.",
            duration(sum),
            duration(whole)
        )
    })
}
