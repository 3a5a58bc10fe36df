//! Layers on a page: a stacked bar for each point, and a key with their times.

use super::{EXPLAINED, colour, parts};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::html::markup::{Cell, Html, Table as Rows};
use crate::render::text::{duration, percent};

/// Maximum number of points shown.
const MOST_POINTS: usize = 40;

pub(in crate::cells) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, parts(point)?)));
    let with: Vec<_> = with.take(MOST_POINTS).collect();
    let longest = with
        .iter()
        .map(|(_, (whole, _))| *whole)
        .fold(0.0, f64::max);
    if with.is_empty() {
        return;
    }
    html.heading(
        prefix,
        ("layers", "Layers"),
        "Where a request spends its time",
    );
    html.note(EXPLAINED);
    html.raw("<div class=\"chart\">\n");
    html.open(
        "div",
        &[("class", "bars"), ("id", &format!("{prefix}layers-bars"))],
    );
    for (point, (whole, parts)) in &with {
        html.element("div", &[("class", "label")], &words::label(&point.settings));
        html.raw("<div class=\"stack\">");
        for part in parts {
            let at = format!(
                "--at:{:.4};--c:var({})",
                part.ns / longest,
                colour(part.name)
            );
            let tip = format!("{}: {}", part.name, duration(part.ns));
            html.element("i", &[("style", &at), ("title", &tip)], "");
        }
        html.raw("</div>");
        html.element("div", &[("class", "sum")], &duration(*whole));
        html.raw("\n");
    }
    html.raw("</div>\n</div>\n");
    let mut rows = Rows::new(format!("{prefix}layers-table"), &["Layer"]);
    let mut names: Vec<&str> = Vec::new();
    for part in with.iter().flat_map(|(_, (_, parts))| parts) {
        if !names.contains(&part.name) {
            names.push(part.name);
        }
    }
    for (point, _) in &with[..with.len().min(MOST_COLUMNS)] {
        rows.add_column(words::label(&point.settings));
    }
    for name in names {
        let cell = |parts: &[super::Part]| {
            let part = parts.iter().find(|part| part.name == name);
            let notes = |part: &super::Part| vec![("", percent(part.share))];
            match part {
                Some(part) => Cell::Figure(duration(part.ns), notes(part)),
                None => Cell::Figure("-".into(), Vec::new()),
            }
        };
        let first = Cell::Coloured(colour(name).to_owned(), name.to_owned());
        let cells = with
            .iter()
            .take(MOST_COLUMNS)
            .map(|(_, (_, parts))| cell(parts));
        rows.row(std::iter::once(first).chain(cells).collect());
    }
    rows.show(html);
}

/// Maximum number of points in the table.
const MOST_COLUMNS: usize = 6;
