//! The report on a terminal: [`report`] for one run, [`compare`] for several. No line is wider than
//! 100 columns.

mod breakdown;
mod compare;
mod environment;
pub(crate) mod page;
mod tables;
mod truth;

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
    let mut page = Page::new(style);
    environment::show(&mut page, analysis);
    if let Some(wiki) = &analysis.wiki {
        tables::wiki(&mut page, wiki);
    }
    if let Some(exact) = &analysis.exact {
        breakdown::show(&mut page, exact);
        truth::show(&mut page, exact);
    }
    tables::rounds(&mut page, &analysis.rounds);
    tables::overhead(&mut page, &analysis.overhead);
    tables::qemu(&mut page, &analysis.qemu);
    tables::calls(&mut page, &analysis.calls);
    tables::locks(&mut page, &analysis.locks);
    tables::problems(&mut page, &analysis.problems);
    page.finish()
}
