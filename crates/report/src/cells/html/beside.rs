//! The points in the experiment's own layout: a parameter's values side by side.

use super::points::{labels, show_columns};
use crate::cells::beside::Sides;
use crate::cells::table::Table;
use crate::render::html::markup::{Cell, Html};

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let Some(sides) = Sides::of(table) else {
        return;
    };
    html.heading(prefix, ("beside", "Side by side"), "Side by side");
    for line in sides.explained() {
        html.note(&line);
    }
    for (number, pair) in (1..).zip(sides.pairs()) {
        html.note(&pair.names.join(", "));
        let axes = pair.rows.first();
        let axes: Vec<String> = axes.map_or(Vec::new(), |row| row.keys().cloned().collect());
        let labels = labels(&axes, pair.rows.iter().copied());
        let column = |(heading, texts): (String, Vec<String>)| {
            let cells = texts.into_iter().map(Cell::Number);
            (heading, cells.collect())
        };
        let groups = pair.columns.into_iter();
        let groups = groups.map(|group| group.into_iter().map(column).collect());
        let id = format!("{prefix}beside-{number}");
        show_columns(html, &id, labels, groups.collect());
    }
}
