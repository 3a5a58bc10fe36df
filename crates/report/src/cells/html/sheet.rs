//! The sheet: measures in rows, and a parameter's values in columns.

use super::points::{labels, show_columns};
use crate::cells::sheet;
use crate::cells::table::Table;
use crate::render::html::markup::{Cell, Html};

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let Some(sheet) = sheet::of(table) else {
        return;
    };
    html.heading(prefix, ("sheet", "Attributes"), "Attributes");
    html.note(sheet::EXPLAINED);
    let axes = sheet.rows.first();
    let axes: Vec<String> = axes.map_or(Vec::new(), |row| row.keys().cloned().collect());
    let labels = labels(&axes, sheet.rows.iter());
    let columns = sheet.columns.into_iter().map(|(heading, texts)| {
        let cells = texts.into_iter().map(Cell::Number);
        vec![(heading, cells.collect())]
    });
    let id = format!("{prefix}sheet-table");
    show_columns(html, &id, labels, columns.collect());
}
