//! The measure that answers for points as bars.

use crate::cells::answer::{main_of, short};
use crate::cells::cell::Column;
use crate::cells::table::{Figure, Point, Table};
use crate::cells::words::{self, Scale};
use crate::render::terminal::page::{Bar, Page};
use crate::render::text::plural;

/// Maximum number of bars of a measure that remain readable.
const MOST_BARS: usize = 24;
/// Maximum number of measures, each of which answers for some points.
const MOST_MEASURES: usize = 3;

pub(super) fn show(page: &mut Page, table: &Table) {
    let mut columns: Vec<&Column> = Vec::new();
    for column in table
        .points
        .iter()
        .filter_map(|point| main_of(table, point))
    {
        if !columns.iter().any(|known| known.name == column.name) {
            columns.push(column);
        }
    }
    for column in columns.into_iter().take(MOST_MEASURES) {
        of(page, table, column);
    }
}

fn of(page: &mut Page, table: &Table, column: &Column) {
    let figures = table.points.iter().filter_map(|point| {
        let is_its = main_of(table, point).is_some_and(|main| main.name == column.name);
        Some((point, point.measures.get(&column.name).filter(|_| is_its)?))
    });
    let figures: Vec<(&Point, &Figure)> = figures.collect();
    let [(first, _), _, ..] = figures.as_slice() else {
        return; // the answer names the only figure
    };
    let shown = &figures[..figures.len().min(MOST_BARS)];
    let scale = Scale::of(column.unit, shown.iter().map(|(_, figure)| figure.median));
    page.heading(&scale.heading(&column.name));
    let bars = shown.iter().map(|(point, figure)| Bar {
        label: short(point, first),
        figures: vec![
            scale.write(figure.median),
            figure.ratio.as_ref().map_or(String::new(), words::marked),
        ],
        length: figure.median,
    });
    page.bars(&bars.collect::<Vec<Bar>>());
    let left = figures.len() - shown.len();
    if left > 0 {
        let more = plural(left as u64, "more point");
        page.note(&format!("And {more} in the tables below."));
    }
}
