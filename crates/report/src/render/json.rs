//! The report as JSON: the [`Analysis`] itself, as its types say; docs/report.md describes it.

use crate::analysis::Analysis;

/// One run as one object, several as a list.
pub fn render(runs: &[&Analysis]) -> String {
    let text = match runs {
        [one] => serde_json::to_string_pretty(one),
        several => serde_json::to_string_pretty(several),
    };
    // An analysis has no maps with keys that are no strings: nothing in it can fail.
    text.unwrap_or_default() + "\n"
}
