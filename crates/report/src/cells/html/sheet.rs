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
    let mut columns = labels(&axes, sheet.rows.iter());
    columns.extend(sheet.columns.into_iter().map(|(heading, texts)| {
        let cells = texts.into_iter().map(Cell::Number);
        (heading, cells.collect())
    }));
    show_columns(html, format!("{prefix}sheet-table"), columns);
}
