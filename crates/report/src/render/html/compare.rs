//! Several runs side by side: the first is the base, the others have their differences to it.

use super::Named;
use super::facts::environment_rows;
use super::markup::{Cell, Html, Table, numbers, rows};
use super::words::layer_colour;
use crate::analysis::{Analysis, Distribution, Layer, LayerRow};
use crate::render::text::micros;

/// What a run is called in a comparison: A to Z, then AA.
pub(super) fn letter(run: usize) -> String {
    let last = char::from(b'A' + (run % 26) as u8);
    match run / 26 {
        0 => last.to_string(),
        before => format!("{}{last}", letter(before - 1)),
    }
}

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

/// What must not be missed when a run's figures are read beside others.
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

/// Facts of the environment that are not the same in all runs.
fn differences(html: &mut Html, runs: &[Named]) {
    let facts: Vec<_> = runs.iter().map(|(_, run)| environment_rows(run)).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in facts.iter().flatten() {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let mut table = Table::new("compare-differences".to_owned(), &[""]);
    for i in 0..runs.len() {
        table.add_column(letter(i));
    }
    for name in names {
        let of = |rows: &Vec<(&str, String)>| {
            let found = rows.iter().find(|row| row.0 == name);
            found.map_or("-".to_owned(), |row| row.1.clone())
        };
        let values: Vec<String> = facts.iter().map(of).collect();
        if values.windows(2).any(|pair| pair[0] != pair[1]) {
            let cells = std::iter::once(name.to_owned()).chain(values);
            table.row(cells.map(Cell::Text).collect());
        }
    }
    if !table.is_empty() {
        html.heading("", ("differences", "Differences"), "What differs");
        table.show(html);
    }
}

/// Layers x runs, and the totals; a run without a layer has `-` there.
fn layers(runs: &[Named], id: &str, of: fn(&Distribution) -> Option<f64>) -> Table {
    let present: Vec<Layer> = Layer::ALL
        .iter()
        .copied()
        .filter(|&layer| runs.iter().any(|(_, run)| row(run, layer).is_some()))
        .collect();
    let names = present
        .iter()
        .map(|&layer| Cell::Coloured(layer_colour(layer), layer.describe().0.to_owned()));
    let values = |run: &Analysis| -> Vec<Option<f64>> {
        let layers = present.iter().map(|&layer| of(&row(run, layer)?.time));
        let total = run.exact.as_ref().and_then(|exact| of(&exact.total));
        layers.chain([total]).collect()
    };
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
            columns.extend(difference(&base, &column));
        }
    }
    let all = rows(columns);
    let last = all.len().saturating_sub(1);
    for (i, cells) in all.into_iter().enumerate() {
        table.classed(if i == last { "total" } else { "" }, cells);
    }
    table
}

/// The difference to the base, in us and in percent of the base.
fn difference(base: &[Option<f64>], values: &[Option<f64>]) -> [Vec<Cell>; 2] {
    let pairs = || base.iter().zip(values);
    let differences: Vec<Option<f64>> = pairs().map(|(a, b)| Some((*b)? - (*a)?)).collect();
    let signed = micros(&differences).into_iter().zip(&differences);
    let signed = signed.map(|(text, value)| match value {
        Some(value) if *value > 0.0 => format!("+{text}"),
        _ => text,
    });
    let percents = pairs().map(|pair| match pair {
        (Some(a), Some(b)) if *a > 0.0 => format!("{:+.0}%", (b - a) / a * 100.0),
        _ => String::new(),
    });
    [numbers(signed.collect()), numbers(percents.collect())]
}

fn row(run: &Analysis, layer: Layer) -> Option<&LayerRow> {
    let layers = &run.exact.as_ref()?.layers;
    layers.iter().find(|row| row.layer == layer)
}

#[cfg(test)]
mod tests {
    #[test]
    fn runs_have_letters_as_columns_of_a_sheet_have() {
        let told: Vec<String> = [0, 25, 26, 51, 52, 701, 702].map(super::letter).to_vec();
        assert_eq!(told, ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
    }
}
