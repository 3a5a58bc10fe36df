//! Compares two runs point by point.

use fathom_run::Better;

use super::points::{Columns, labels, show_columns, told};
use crate::cells::answer;
use crate::cells::cell::Column;
use crate::cells::compare::{Compared, Comparison, Pair};
use crate::cells::table::Figure;
use crate::cells::words::{MOST_ROWS, Scale};
use crate::render::html::markup::{Cell, Html, Table};

pub(super) fn show(html: &mut Html, comparison: &Comparison) {
    html.raw("<header>\n");
    let answer = answer::of_comparison(comparison);
    html.element("p", &[("class", "verdict")], &answer);
    html.raw("\n<h1>Runs of an experiment compared</h1>\n</header>\n<dl class=\"runs\">\n");
    for (letter, (name, table)) in ["A", "B"].into_iter().zip(&comparison.runs) {
        html.raw("<dt>");
        html.element("a", &[("href", &format!("#run-{letter}"))], letter);
        html.raw("</dt><dd>");
        html.element("code", &[], name);
        html.raw(" ");
        html.text(&table.title);
        html.raw("</dd>\n");
    }
    html.raw("</dl>\n");
    html.heading("", ("compare", "Compared"), "Points of both");
    html.open("ul", &[("id", "compare-verdicts")]);
    for line in comparison.verdicts() {
        html.element("li", &[], &line);
        html.raw("\n");
    }
    html.raw("</ul>\n");
    for line in comparison.explained() {
        html.note(&line);
    }
    let shown = &comparison.points[..comparison.points.len().min(MOST_ROWS)];
    let axes: Vec<String> = shown
        .first()
        .map_or(Vec::new(), |point| point.settings.keys().cloned().collect());
    let labels = labels(&axes, shown.iter().map(|point| &point.settings));
    let groups = comparison
        .measures
        .iter()
        .map(|column| pairs(column, shown));
    show_columns(html, "compare-table", labels, groups.collect());
    if !comparison.differences.is_empty() {
        html.heading("", ("differences", "Differences"), "Differences");
        let mut table = Table::new("compare-differences".into(), &["", "A", "B"]);
        for difference in &comparison.differences {
            let values = difference.values.iter().cloned();
            let cells = std::iter::once(difference.name.clone()).chain(values);
            table.row(cells.map(Cell::Text).collect());
        }
        table.show(html);
    }
}

/// Returns a measure's columns: A, B, and their ratio if the measure can be better or worse.
fn pairs(column: &Column, points: &[Compared]) -> Columns {
    let of = || points.iter().map(|point| point.measures.get(&column.name));
    let medians = of()
        .flatten()
        .flat_map(|pair| [pair.a.median, pair.b.median]);
    let scale = Scale::of(column.unit, medians).for_pages();
    let none = || Cell::Figure("-".into(), Vec::new());
    let side = |side: fn(&Pair) -> &Figure| -> Vec<Cell> {
        let cell = |figure: &Figure| {
            let interval = figure
                .interval
                .map(|interval| ("", scale.interval(Some(interval))));
            Cell::Figure(scale.write(figure.median), interval.into_iter().collect())
        };
        of().map(|pair| pair.map_or_else(none, |pair| cell(side(pair))))
            .collect()
    };
    let name = scale.heading(&column.name);
    let mut columns = vec![
        (format!("{name} A"), side(|pair| &pair.a)),
        ("B".into(), side(|pair| &pair.b)),
    ];
    if column.better != Better::Neither {
        let ratio = |pair: Option<&Pair>| {
            let ratio = pair.and_then(|pair| pair.ratio.as_ref());
            let note = ratio.map(told);
            Cell::Figure(String::new(), note.into_iter().collect())
        };
        columns.push(("B/A".into(), of().map(ratio).collect()));
    }
    columns
}
