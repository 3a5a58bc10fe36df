//! The elements that all sections of a terminal's report use.

use super::Style;
use crate::render::text::{Table, WIDTH, clean, wrapped};

/// A page that is being written.
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

    /// Adds a section's heading.
    pub(crate) fn heading(&mut self, text: &str) {
        if !self.out.is_empty() {
            self.line("");
        }
        for line in wrapped(&clean(text), WIDTH) {
            self.painted("1", &line);
        }
    }

    /// Adds a fact as a name and a text: `  clocks     KVM's TSC offset`.
    pub(crate) fn fact(&mut self, name: &str, text: &str) {
        const NAME: usize = 11;
        for (i, line) in wrapped(&clean(text), WIDTH - NAME - 4).iter().enumerate() {
            let name = if i == 0 { clean(name) } else { String::new() };
            self.line(&format!("  {name:<NAME$}  {line}"));
        }
    }

    /// Adds a sentence.
    pub(crate) fn note(&mut self, text: &str) {
        for line in wrapped(&clean(text), WIDTH - 2) {
            self.line(&format!("  {line}"));
        }
    }

    /// Adds a warning.
    pub(crate) fn warning(&mut self, text: &str) {
        for (i, line) in wrapped(&clean(text), WIDTH - 4).iter().enumerate() {
            let mark = if i == 0 { '!' } else { ' ' };
            self.painted("31", &format!("{mark} {line}"));
        }
    }

    /// Adds a table with dimmed headings.
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

    /// Adds a line of a table with its own layout; headings are dimmed.
    pub(crate) fn fixed(&mut self, text: &str, is_heading: bool) {
        let line = format!("  {}", clean(text).trim_end());
        match is_heading {
            true => self.painted("2", &line),
            false => self.line(&line),
        }
    }

    /// Adds an empty line between two tables of a section.
    pub(crate) fn gap(&mut self) {
        self.line("");
    }
}
