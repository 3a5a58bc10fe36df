//! What was measured, and on what.

use super::page::Page;
use crate::analysis::Analysis;
use crate::render::facts;
use crate::render::text::date;

pub(super) fn show(page: &mut Page, analysis: &Analysis) {
    page.heading(&analysis.title);
    page.fact("recorded", &date(analysis.created));
    for (name, words) in facts::environment(analysis) {
        page.fact(name, &words);
    }
    if analysis.environment.stretched {
        page.warning(facts::STRETCHED);
    }
}
