//! The setup of a run.

use super::page::Page;
use crate::analysis::Analysis;
use crate::render::facts;
use crate::render::text::{date, plain};

/// Warns of what makes all figures of the run doubtful.
pub(super) fn warnings(page: &mut Page, analysis: &Analysis) {
    if analysis.environment.stretched {
        page.warning(facts::STRETCHED);
    }
    if let Some(exact) = &analysis.exact
        && !exact.truth.lost.is_empty()
    {
        let lost = facts::lost(&exact.truth, plain);
        page.warning(&format!("{lost} were dropped: the tails are INVALID."));
    }
}

pub(super) fn show(page: &mut Page, analysis: &Analysis) {
    page.heading("Environment");
    page.fact("recorded", &date(analysis.created));
    for (name, words) in facts::environment(analysis) {
        page.fact(name, &words);
    }
}
