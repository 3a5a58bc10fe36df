//! The report as JSON: the [`Analysis`] itself, as its types define; docs/report.md describes it.

use crate::analysis::Analysis;

/// Renders one run as an object, and several runs as a list.
pub fn render(runs: &[&Analysis]) -> String {
    let text = match runs {
        [one] => serde_json::to_string_pretty(one),
        several => serde_json::to_string_pretty(several),
    };
    // An analysis has no maps with non-string keys, so serialization cannot fail.
    text.unwrap_or_default() + "\n"
}
