//! Compares several runs: the first is the base, the others show their differences to it.

use super::Named;
use super::data::is_gap;
use super::markup::{Cell, Html, Table, numbers, rows};
use crate::analysis::{Analysis, Distribution};
use crate::render::comparison::{self, letter};
use crate::render::text::micros;

pub(super) fn show(html: &mut Html, runs: &[Named]) {
    html.raw("<dl class=\"runs\">\n");
    for (i, (name, run)) in runs.iter().enumerate() {
        let letter = letter(i);
        html.raw("<dt>");
        html.element("a", &[("href", &format!("#run-{letter}"))], &letter);
        html.raw("</dt><dd>");
        html.element("code", &[], name);
        html.raw(" ");
        html.text(&run.title);
        doubts(html, run);
        html.raw("</dd>\n");
    }
    html.raw("</dl>\n");
    html.chart("compare-bars", 0);
    differences(html, runs);
    if runs.iter().any(|(_, run)| run.exact.is_some()) {
        html.heading("", ("means", "Means"), "Layers, mean (\u{b5}s)");
        layers(runs, "compare-mean", |time| Some(time.mean)).show(html);
        html.heading("", ("tails", "p99"), "Layers, p99 (\u{b5}s)");
        layers(runs, "compare-p99", |time| time.p99.map(|ns| ns as f64)).show(html);
        html.heading(
            "",
            ("distributions", "Distributions"),
            "Distributions of the total",
        );
        html.chart("compare-ecdf", 0);
    }
}

/// Shows the warnings that matter when a run is compared with others.
fn doubts(html: &mut Html, run: &Analysis) {
    let mut doubt = |text| html.element("span", &[("class", "caution")], text);
    if run.environment.stretched {
        doubt("times are stretched: its host is itself emulated");
    }
    match &run.exact {
        None => doubt("no exact breakdown"),
        Some(exact) if !exact.truth.lost.is_empty() => {
            doubt("events were dropped: its tails are INVALID");
        }
        Some(_) => {}
    }
}

/// Shows the facts of the environment that differ between the runs.
fn differences(html: &mut Html, runs: &[Named]) {
    let mut table = Table::new("compare-differences".to_owned(), &[""]);
    for i in 0..runs.len() {
        table.add_column(letter(i));
    }
    for (name, values) in comparison::differences(runs) {
        let cells = std::iter::once(name.to_owned()).chain(values);
        table.row(cells.map(Cell::Text).collect());
    }
    if !table.is_empty() {
        html.heading("", ("differences", "Differences"), "Differences");
        table.show(html);
    }
}

/// Returns a table of layers by runs, with totals; a layer that a run lacks is `-`.
fn layers(runs: &[Named], id: &str, of: fn(&Distribution) -> Option<f64>) -> Table {
    let present = comparison::present(runs.iter().map(|(_, run)| run));
    let names = present
        .iter()
        .map(|&layer| Cell::Layer(layer, is_gap(runs, layer)));
    let values = |run: &Analysis| comparison::column(run, &present, of);
    let mut table = Table::new(id.to_owned(), &["Layer"]);
    let mut columns: Vec<Vec<Cell>> = vec![names.chain([Cell::Text("total".into())]).collect()];
    let base = runs.first().map_or(Vec::new(), |(_, run)| values(run));
    for (i, (_, run)) in runs.iter().enumerate() {
        let letter = letter(i);
        let column = values(run);
        columns.push(numbers(micros(&column)));
        table.add_column(letter.clone());
        if i > 0 {
            table.add_column(format!("{letter} \u{2212} A"));
            table.add_column("");
            columns.extend(comparison::difference(&base, &column).map(numbers));
        }
    }
    table.totalled(rows(columns));
    table
}
