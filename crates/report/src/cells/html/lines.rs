//! The series sampled over time in each cell, in collapsed sections.

use std::fmt::Write;

use fathom_run::Series;

use crate::cells::cell::Row;
use crate::cells::table::Table;
use crate::cells::words::{self, Scale};
use crate::render::html::markup::Html;
use crate::render::text::plural;

/// Maximum number of charts on a page.
const MOST_CHARTS: usize = 600;
/// Width and height of a chart, in its own units.
const WIDTH: f64 = 272.0;
const HEIGHT: f64 = 58.0;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let with = table.cells.iter().filter(|cell| !cell.series.is_empty());
    let with: Vec<&Row> = with.collect();
    if with.is_empty() {
        return;
    }
    html.heading(prefix, ("series", "Over time"), "Over time, by cells");
    let (mut charts, mut shown) = (0, 0);
    for cell in &with {
        charts += cell.series.len();
        if charts > MOST_CHARTS {
            break;
        }
        shown += 1;
        show_cell(html, table, cell);
    }
    if shown < with.len() {
        let more = plural((with.len() - shown) as u64, "more cell");
        html.note(&format!("And {more}, which JSON has."));
    }
}

fn show_cell(html: &mut Html, table: &Table, cell: &Row) {
    let settings = table.axes.iter();
    let settings =
        settings.filter_map(|name| Some((name.clone(), cell.settings.get(name)?.clone())));
    let label = words::label(&settings.collect());
    html.raw("<details><summary>");
    html.element("code", &[], &cell.id);
    html.text(&format!(" {label}, round {}", cell.round));
    html.raw("</summary>\n<div class=\"sparks\">\n");
    for series in &cell.series {
        chart(html, series);
    }
    html.raw("</div></details>\n");
}

fn chart(html: &mut Html, series: &Series) {
    let values = || {
        series
            .values
            .iter()
            .copied()
            .filter(|value| value.is_finite())
    };
    let least = values().fold(f64::INFINITY, f64::min);
    let most = values().fold(f64::NEG_INFINITY, f64::max);
    // The range always includes zero, so that noise does not look large.
    let (low, high) = (least.min(0.0), most.max(0.0));
    let scale = Scale::of(series.unit, values()).for_pages();
    let name = scale.heading(&series.name);
    let caption = match values().next() {
        None => format!("{name}: no samples"),
        Some(_) => format!("{name}: {} to {}", scale.write(least), scale.write(most)),
    };
    html.raw("<figure class=\"spark\">");
    html.element("figcaption", &[], &caption);
    let view = format!("0 0 {WIDTH} {HEIGHT}");
    let attributes = [
        ("viewBox", view.as_str()),
        ("preserveAspectRatio", "none"),
        ("role", "img"),
    ];
    html.open("svg", &attributes);
    html.element(
        "polyline",
        &[("points", &path(&series.values, low, high))],
        "",
    );
    html.raw("</svg></figure>\n");
}

/// Returns the points of a line from left to right, scaled from `low..high` to the height.
fn path(values: &[f64], low: f64, high: f64) -> String {
    // Halve first: the difference of the two could overflow.
    let range = high / 2.0 - low / 2.0;
    let y = |value: f64| match (value / 2.0 - low / 2.0) / range {
        share if share.is_finite() => HEIGHT - 3.0 - share.clamp(0.0, 1.0) * (HEIGHT - 6.0),
        _ => HEIGHT / 2.0,
    };
    let step = WIDTH / (values.len().max(2) - 1) as f64;
    let mut path = String::new();
    for (i, value) in values.iter().enumerate() {
        let _ = write!(path, "{:.1},{:.1} ", step * i as f64, y(*value));
    }
    if let [value] = values {
        let _ = write!(path, "{WIDTH},{:.1}", y(*value));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_through_its_samples() {
        assert_eq!(
            path(&[0.0, 10.0, 5.0], 0.0, 10.0),
            "0.0,55.0 136.0,3.0 272.0,29.0 "
        );
        assert_eq!(path(&[7.0], 0.0, 7.0), "0.0,3.0 272,3.0");
        assert_eq!(path(&[0.0, 0.0], 0.0, 0.0), "0.0,29.0 272.0,29.0 ");
        let most = [f64::MAX, -f64::MAX, f64::NAN];
        assert_eq!(
            path(&most, -f64::MAX, f64::MAX),
            "0.0,3.0 136.0,55.0 272.0,29.0 "
        );
    }
}
