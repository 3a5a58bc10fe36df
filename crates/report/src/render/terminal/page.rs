//! What all sections of the terminal's report are written with.

use super::Style;
use crate::render::text::{Table, WIDTH, clean, wrapped};

/// Text under way.
pub(crate) struct Page {
    out: String,
    style: Style,
}

impl Page {
    pub(crate) fn new(style: Style) -> Page {
        Page {
            out: String::new(),
            style,
        }
    }

    pub(crate) fn finish(self) -> String {
        self.out
    }

    fn line(&mut self, text: &str) {
        self.out.push_str(text);
        self.out.push('\n');
    }

    fn painted(&mut self, code: &str, text: &str) {
        if self.style.colour {
            self.line(&format!("\x1b[{code}m{text}\x1b[0m"));
        } else {
            self.line(text);
        }
    }

    /// A section's name.
    pub(crate) fn heading(&mut self, text: &str) {
        if !self.out.is_empty() {
            self.line("");
        }
        for line in wrapped(&clean(text), WIDTH) {
            self.painted("1", &line);
        }
    }

    /// A name and what is to be said of it: `  clocks     KVM's TSC offset`.
    pub(crate) fn fact(&mut self, name: &str, text: &str) {
        const NAME: usize = 11;
        for (i, line) in wrapped(&clean(text), WIDTH - NAME - 4).iter().enumerate() {
            let name = if i == 0 { clean(name) } else { String::new() };
            self.line(&format!("  {name:<NAME$}  {line}"));
        }
    }

    /// A sentence.
    pub(crate) fn note(&mut self, text: &str) {
        for line in wrapped(&clean(text), WIDTH - 2) {
            self.line(&format!("  {line}"));
        }
    }

    /// A sentence that must not be missed.
    pub(crate) fn warning(&mut self, text: &str) {
        for (i, line) in wrapped(&clean(text), WIDTH - 4).iter().enumerate() {
            let mark = if i == 0 { '!' } else { ' ' };
            self.painted("31", &format!("{mark} {line}"));
        }
    }

    /// A table, its headings dim.
    pub(crate) fn table(&mut self, table: &Table) {
        for (i, line) in table.lines(2).iter().enumerate() {
            let line = clean(line);
            if i == 0 {
                self.painted("2", &line);
            } else {
                self.line(&line);
            }
        }
    }

    /// A line of a table with a layout of its own; headings are dim.
    pub(crate) fn fixed(&mut self, text: &str, is_heading: bool) {
        let line = format!("  {}", clean(text).trim_end());
        match is_heading {
            true => self.painted("2", &line),
            false => self.line(&line),
        }
    }

    /// An empty line between two tables of a section.
    pub(crate) fn gap(&mut self) {
        self.line("");
    }
}
