//! The elements that all sections of a terminal's report use.

use super::Style;
use crate::render::layout::{Layout, Sheet};
use crate::render::text::{Table, WIDTH, clean, wrapped};

/// Greatest width of a bar in characters.
const BAR: usize = 34;
/// Greatest width of a bar's label in characters.
const LABEL: usize = 44;

/// A page that is being written.
pub(crate) struct Page {
    out: String,
    style: Style,
}

/// A bar with its label and its figures.
pub(crate) struct Bar {
    pub(crate) label: String,
    /// Figures between the label and the bar, a column each.
    pub(crate) figures: Vec<String>,
    /// Length; the longest bar of a picture has the full width.
    pub(crate) length: f64,
}

impl Sheet for Page {
    fn append(&mut self, piece: Page) {
        if !self.out.is_empty() && !piece.out.is_empty() {
            self.line("");
        }
        self.out.push_str(&piece.out);
    }
}

impl Page {
    pub(crate) fn new(style: Style) -> Page {
        Page {
            out: String::new(),
            style,
        }
    }

    /// Creates a report that begins with its answer and the lines that belong to the answer;
    /// `title` is the name of what it reports.
    pub(crate) fn report(
        style: Style,
        answer: &str,
        more: impl IntoIterator<Item = String>,
        title: &str,
    ) -> Layout<Page> {
        let mut layout = Layout::new(|| Page::new(style));
        layout.answer.heading(answer);
        more.into_iter().for_each(|line| layout.answer.note(&line));
        layout.answer.gap();
        layout.answer.note(title);
        layout
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

    /// Adds bars in one scale, without headings. A bar that is shorter than a character is empty.
    pub(crate) fn bars(&mut self, bars: &[Bar]) {
        let longest = bars.iter().map(|bar| bar.length).fold(0.0, f64::max);
        let columns = bars.first().map_or(0, |bar| bar.figures.len());
        let mut table = Table::new(1, &[""]);
        (0..=columns).for_each(|_| table.add_column(""));
        for bar in bars {
            let share = bar.length.max(0.0) / longest.max(f64::MIN_POSITIVE);
            let filled = "#".repeat((share * BAR as f64).round() as usize);
            let label = match bar.label.char_indices().nth(LABEL) {
                Some((end, _)) => format!("{}..", &bar.label[..end]),
                None => bar.label.clone(),
            };
            let figures = bar.figures.iter().cloned();
            let drawn = std::iter::once(format!("{filled:<BAR$}"));
            table.row(std::iter::once(label).chain(figures).chain(drawn));
        }
        for line in table.lines(2).iter().skip(1) {
            self.line(&clean(line));
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
