//! The report on a terminal: [`report`] for one run, [`compare`] for several. No line is wider than
//! 100 columns.

mod breakdown;
mod compare;
mod environment;
pub(crate) mod page;
mod tables;
mod truth;

use super::answer::{self, Suspect};
use super::text::duration;
use crate::analysis::Analysis;
use page::Page;

pub use compare::compare;

/// How the report is shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Uses escape sequences for bold headings and red warnings; for terminals only.
    pub colour: bool,
}

/// Renders everything about one run as text.
pub fn report(analysis: &Analysis, style: Style) -> String {
    report_and(analysis, None, style)
}

/// Renders a run whose limiter is suspected from evidence around it.
pub(crate) fn report_and(analysis: &Analysis, suspect: Option<&Suspect>, style: Style) -> String {
    let answer = answer::of_run(analysis, suspect, duration);
    let advice = answer.advice.map(str::to_owned);
    let mut parts = Page::report(style, &answer.text(), advice, &analysis.title);
    environment::warnings(&mut parts.answer, analysis);
    answer
        .errors
        .iter()
        .for_each(|error| parts.answer.warning(error));
    if let Some(exact) = &analysis.exact {
        breakdown::picture(&mut parts.picture, exact);
        breakdown::tables(&mut parts.table, exact);
    }
    let tables = &mut parts.table;
    if let Some(wiki) = &analysis.wiki {
        tables::wiki(tables, wiki);
    }
    tables::rounds(tables, &analysis.rounds);
    tables::overhead(tables, &analysis.overhead);
    tables::qemu(tables, &analysis.qemu);
    tables::calls(tables, &analysis.calls);
    tables::locks(tables, &analysis.locks);
    environment::show(&mut parts.environment, analysis);
    if let Some(exact) = &analysis.exact {
        truth::show(&mut parts.environment, exact);
    }
    tables::problems(&mut parts.environment, &analysis.problems);
    parts.finish().finish()
}
