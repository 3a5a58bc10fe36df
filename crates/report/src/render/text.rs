//! Numbers and texts in human-readable form, and tables of text.

use std::fmt::Write;

use fathom_units::{Utc, short_size};

/// Maximum width of a table, in characters.
pub(crate) const WIDTH: usize = 100;

/// Replaces characters of a run's text that could move the cursor or change the text's direction.
pub(crate) fn clean(text: &str) -> String {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars()
        .map(|c| if harmful(c) { '\u{fffd}' } else { c })
        .collect()
}

/// Writes a time with its unit: `1.25 us`, `3.40 ms`.
pub(crate) fn duration(ns: f64) -> String {
    let size = ns.abs();
    let (scale, unit) = match size {
        _ if size < 1e3 => return format!("{ns:.0} ns"),
        _ if size < 1e6 => (1e3, "us"),
        _ if size < 1e9 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{:.2} {unit}", ns / scale)
}

/// Writes a size such as `4k` or `1M`; a size without a short form is in bytes.
pub(crate) fn size(bytes: u64) -> String {
    let short = short_size(bytes);
    match short.ends_with(|last: char| last.is_ascii_digit()) {
        true => format!("{short} B"),
        false => short,
    }
}

/// Writes a share of 1 as percent.
pub(crate) fn percent(share: f64) -> String {
    unsigned_zero(format!("{:.1}", share * 100.0)) + "%"
}

/// Writes a count's digits.
pub(crate) fn plain(count: u64) -> String {
    count.to_string()
}

/// Writes a count with its noun: `1 request`, `2 requests`.
pub(crate) fn plural(count: u64, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Writes seconds since 1970 as a date and time in UTC.
pub(crate) fn date(seconds: u64) -> String {
    format!("{} UTC", Utc::from_seconds(seconds))
}

/// Writes a column of times in us, all with the decimals that suit the greatest; None is `-`.
pub(crate) fn micros(column: &[Option<f64>]) -> Vec<String> {
    scaled(column, 1e3)
}

/// Writes a time in s with six decimals, as in the wiki's tables.
pub(crate) fn seconds(ns: f64) -> String {
    format!("{:.6}", ns / 1e9)
}

fn scaled(column: &[Option<f64>], unit: f64) -> Vec<String> {
    let sizes = column.iter().flatten().map(|value| (value / unit).abs());
    let decimals = match sizes.fold(0.0, f64::max) {
        most if most < 1_000.0 => 2,
        most if most < 100_000.0 => 1,
        _ => 0,
    };
    let cell = |value: &Option<f64>| match value {
        Some(value) => unsigned_zero(format!("{:.decimals$}", value / unit)),
        None => "-".to_owned(),
    };
    column.iter().map(cell).collect()
}

/// Removes the sign of a value that is rounded to zero.
fn unsigned_zero(text: String) -> String {
    match text.strip_prefix('-') {
        Some(rest) if rest.bytes().all(|b| b == b'0' || b == b'.') => rest.to_owned(),
        _ => text,
    }
}

/// A table of text; the first columns are aligned to the left, the others to the right.
#[derive(Debug, Default)]
pub(crate) struct Table {
    left: usize,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these headings; the first `left` columns contain words.
    pub(crate) fn new(left: usize, header: &[&str]) -> Table {
        Table {
            left,
            header: header.iter().map(|&text| text.to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn add_column(&mut self, heading: impl Into<String>) {
        self.header.push(heading.into());
    }

    /// Adds a row; missing cells at its end are empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// Adds rows, given as columns.
    pub(crate) fn columns(&mut self, columns: &[Vec<String>]) {
        let rows = columns.first().map_or(0, Vec::len);
        for i in 0..rows {
            self.row(columns.iter().map(|column| column[i].clone()));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the lines, headings first. No line is wider than [`WIDTH`]: if needed, the widest
    /// column of words is shortened.
    pub(crate) fn lines(&self, indent: usize) -> Vec<String> {
        let mut widths: Vec<usize> = self.header.iter().map(|text| wide(text)).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(wide(cell));
            }
        }
        let gaps = |gap: usize| indent + gap * widths.len().saturating_sub(1);
        let sum: usize = widths.iter().sum();
        let gap = if sum + gaps(2) <= WIDTH { 2 } else { 1 };
        let mut excess = (sum + gaps(gap)).saturating_sub(WIDTH);
        while excess > 0 {
            let Some(widest) = widths[..self.left].iter_mut().max() else {
                break;
            };
            if *widest <= 8 {
                break;
            }
            *widest -= 1;
            excess -= 1;
        }
        let rows = std::iter::once(&self.header).chain(&self.rows);
        rows.map(|row| self.line(row, &widths, indent, gap))
            .collect()
    }

    fn line(&self, row: &[String], widths: &[usize], indent: usize, gap: usize) -> String {
        let mut line = " ".repeat(indent);
        for (i, (cell, &width)) in row.iter().zip(widths).enumerate() {
            if i > 0 {
                line.push_str(&" ".repeat(gap));
            }
            let cell = shortened(cell, width);
            let written = if i < self.left {
                write!(line, "{cell:<width$}")
            } else {
                write!(line, "{cell:>width$}")
            };
            debug_assert!(written.is_ok());
        }
        line.truncate(line.trim_end().len());
        line
    }
}

fn wide(text: &str) -> usize {
    text.chars().count()
}

fn shortened(text: &str, width: usize) -> String {
    if wide(text) <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(2)).collect();
    format!("{kept}..")
}

/// Breaks text at spaces into lines of at most `width` characters; longer words stay whole.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            line.push_str(word);
        } else if wide(line) + 1 + wide(word) <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_the_calendars() {
        // Expected values are from `date -u -d @N`.
        let cases = [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_278_082_512, "2010-07-02 14:55:12 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn sizes_say_their_unit() {
        let sizes = [0, 512, 1536, 4096, 3 << 20, 1 << 40].map(size);
        assert_eq!(sizes, ["0 B", "512 B", "1536 B", "4k", "3M", "1T"]);
    }

    #[test]
    fn a_column_has_one_number_of_decimals() {
        let column = [Some(1_234.0), None, Some(-1.0), Some(250_000_000.0)];
        assert_eq!(micros(&column), ["1", "-", "0", "250000"]);
        assert_eq!(micros(&column[..3]), ["1.23", "-", "0.00"]);
    }

    #[test]
    fn no_table_is_wider_than_a_page() {
        let mut table = Table::new(2, &["name", "other", "n"]);
        table.row(["x".repeat(90), "y".repeat(70), "123456789".into()]);
        table.row(["short".into()]);
        for line in table.lines(2) {
            assert!(wide(&line) <= WIDTH, "{line}");
        }
        assert!(table.lines(2)[1].ends_with(" 123456789"));
    }

    #[test]
    fn names_do_not_steer_the_terminal() {
        assert_eq!(clean("a\x1b[2J\u{202e}b"), "a\u{fffd}[2J\u{fffd}b");
        assert_eq!(clean("\u{9b}2J\u{2066}"), "\u{fffd}2J\u{fffd}");
    }

    #[test]
    fn words_that_are_too_long_stay_whole() {
        assert_eq!(wrapped("aa bbbbbb c d", 4), ["aa", "bbbbbb", "c d"]);
    }
}
