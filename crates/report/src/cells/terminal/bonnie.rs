//! bonnie++'s table: two columns for each phase, and a few lines for each point.

use crate::cells::bonnie::{self, Entry, PARTS, Part};
use crate::cells::cell::clipped;
use crate::cells::table::{Point, Table};
use crate::cells::words::MOST_ROWS;
use crate::render::terminal::page::Page;

/// Width of a phase: eight digits, a blank, three digits.
const PHASE: usize = 12;
/// Largest and smallest width of a point's name.
const MOST_LABEL: usize = 19;
const LEAST_LABEL: usize = 10;

/// A line of a point: its name, and the text that it takes from each entry.
type Row = (&'static str, fn(&Entry) -> String);

const ROWS: [Row; 4] = [
    ("", |entry| format!("{:>8} {:>3}", entry.rate, entry.cpu)),
    ("  latency", |entry| entry.latency.clone()),
    ("  ratio", |entry| entry.ratio.clone()),
    ("  interval", |entry| entry.interval.clone()),
];

pub(super) fn show(page: &mut Page, table: &Table) {
    let parts = PARTS.iter().filter(|part| part.is_in(table));
    let parts: Vec<&Part> = parts.collect();
    if parts.is_empty() {
        return;
    }
    page.heading("bonnie++");
    let shown = &table.points[..table.points.len().min(MOST_ROWS)];
    let labels = labels(page, shown);
    let widest = labels.iter().map(|label| label.chars().count()).max();
    let width = widest.unwrap_or(0).max(LEAST_LABEL);
    for part in parts {
        headings(page, part, width);
        for (point, label) in shown.iter().zip(&labels) {
            let entries = part.phases().map(|phase| phase.entry(point));
            let entries: Vec<Entry> = entries.collect();
            for (name, of) in ROWS {
                let cells: Vec<String> = entries.iter().map(of).collect();
                let is_first = name.is_empty();
                if !is_first && cells.iter().all(String::is_empty) {
                    continue;
                }
                let name = if is_first { label } else { name };
                let cells = cells.iter().map(|cell| format!(" {cell:>PHASE$}"));
                page.fixed(
                    &format!("{name:<width$}{}", cells.collect::<String>()),
                    false,
                );
            }
        }
        page.gap();
    }
    page.note(&bonnie::explained(table));
}

/// Returns the names of points, or numbers if the names are too long.
fn labels(page: &mut Page, points: &[Point]) -> Vec<String> {
    let names = points.iter().map(|point| bonnie::label(&point.settings));
    let names: Vec<String> = names.collect();
    if names.iter().all(|name| name.chars().count() <= MOST_LABEL) {
        return names;
    }
    for (number, name) in (1..).zip(&names) {
        page.fact(&format!("#{number}"), &clipped(name, 300));
    }
    page.gap();
    (1..=names.len())
        .map(|number| format!("#{number}"))
        .collect()
}

fn headings(page: &mut Page, part: &Part, width: usize) {
    let blank = " ".repeat(width);
    let groups = part.groups.iter().map(|group| {
        let span = (PHASE + 1) * group.phases.len() - 1;
        format!(" {}", dashed(group.heading, span))
    });
    page.fixed(&format!("{blank}{}", groups.collect::<String>()), true);
    let phases = part.phases();
    let names = phases
        .clone()
        .map(|phase| format!(" {}", dashed(phase.heading, PHASE)));
    page.fixed(&format!("{blank}{}", names.collect::<String>()), true);
    let units = phases.map(|phase| format!(" {:>8} %CP", phase.unit()));
    page.fixed(&format!("{blank}{}", units.collect::<String>()), true);
}

/// Centres a heading between dashes, such as `--Block---`.
fn dashed(text: &str, width: usize) -> String {
    format!("{text:-^width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_are_as_wide_as_their_columns() {
        assert_eq!(dashed("Block", 12), "---Block----");
        let entry = Entry {
            rate: "74157".into(),
            cpu: "13".into(),
            ..Entry::default()
        };
        assert_eq!(ROWS[0].1(&entry).len(), PHASE);
        for part in &PARTS {
            // A page is 100 columns wide, of which two are its margin.
            assert!(part.phases().count() * (PHASE + 1) + MOST_LABEL + 2 <= 100);
        }
    }
}
