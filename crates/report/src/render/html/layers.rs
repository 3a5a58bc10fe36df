//! Where the time goes: the charts of a run's requests, the table of layers, the groups, and the
//! wiki's two tables.

use super::data::{above_median, wiki_group};
use super::header::{group_name, groups};
use super::markup::{Cell, Html, Table, numbers, rows};
use super::path;
use super::words::group_colour;
use crate::analysis::{Analysis, Distribution, Exact, LayerRow, Wiki};
use crate::render::text::{micros, percent};

const HEADINGS: &[&str] = &[
    "Layer", "N", "mean", "p50", "p90", "p99", "p99.9", "max", "share",
];

/// A run's place in the page: the prefix of its ids, and its index in the charts' data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) prefix: &'a str,
    pub(super) run: usize,
}

impl Place<'_> {
    pub(super) fn id(self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// Shows the layers as bars and as a path, and the distribution of the requests.
pub(super) fn picture(html: &mut Html, place: Place, run: &Analysis) {
    html.heading(place.prefix, ("where", "Where"), "Where the time goes");
    html.chart("bars", place.run);
    if let Some(exact) = &run.exact {
        if exact.total.count > 0 {
            path::show(html, place, run, exact);
        }
        curves(html, place, exact);
    }
}

/// Shows the tables of the layers, of the slowest requests, and of the wiki.
pub(super) fn tables(html: &mut Html, place: Place, run: &Analysis) {
    if let Some(exact) = &run.exact {
        html.heading(place.prefix, ("layers", "Layers"), "Layers");
        html.note(
            "Times in \u{b5}s, of every request followed through all layers; a request that does \
             not pass a layer counts as 0. A percentile is shown where ten requests lie beyond it.",
        );
        layers(place, exact).show(html);
        by_group(place, exact).show(html);
        tail(html, place, exact);
    }
    if let Some(wiki) = &run.wiki {
        wiki_tables(html, place, wiki);
    }
}

/// Shows why the slowest requests are slow: each layer's time in an ordinary request, in one of the
/// slowest, and the difference, greatest difference first.
fn tail(html: &mut Html, place: Place, exact: &Exact) {
    let all = exact.layers.iter();
    let mut above: Vec<(&LayerRow, f64)> = all
        .filter_map(|row| Some((row, above_median(row)?)))
        .collect();
    if above.is_empty() {
        return;
    }
    above.sort_by(|a, b| b.1.total_cmp(&a.1));
    let whole: f64 = above.iter().map(|(_, ns)| ns).sum();
    html.heading(
        place.prefix,
        ("tail", "Tail"),
        "The slowest 1% above the median request",
    );
    html.note(
        "Times in \u{b5}s: the mean of the requests around the median (the middle tenth), that of \
         the slowest 1%, and what these have more.",
    );
    let headings = [
        "Layer",
        "median request",
        "slowest 1%",
        "above",
        "share of that",
    ];
    let mut table = Table::new(place.id("tail-table"), &headings);
    let column = |of: &dyn Fn(&LayerRow) -> Option<f64>| -> Vec<String> {
        let values: Vec<Option<f64>> = above.iter().map(|(row, _)| of(row)).collect();
        let sum = values.iter().flatten().sum();
        micros(&values.into_iter().chain([Some(sum)]).collect::<Vec<_>>())
    };
    let signed = |text: String| match text.starts_with('-') || text.starts_with("0.00") {
        true => text,
        false => format!("+{text}"),
    };
    let names = above
        .iter()
        .map(|(row, _)| Cell::Layer(row.layer, exact.is_gap(row.layer)));
    let shares = above.iter().map(|(_, ns)| Cell::Share(ns / whole.max(1.0)));
    let columns = vec![
        names.chain([Cell::Text("total".into())]).collect(),
        numbers(column(&|row| row.middle_mean)),
        numbers(column(&|row| row.tail_mean)),
        numbers(column(&above_median).into_iter().map(signed).collect()),
        shares.chain([Cell::Number(percent(1.0))]).collect(),
    ];
    table.totalled(rows(columns));
    table.show(html);
}

fn curves(html: &mut Html, place: Place, exact: &Exact) {
    html.heading(
        place.prefix,
        ("distribution", "Distribution"),
        "Distribution",
    );
    html.chart("ecdf", place.run);
    if !exact.heat.cells.is_empty() {
        html.heading(place.prefix, ("time", "Over time"), "Over time");
        html.chart("heat", place.run);
    }
    if !exact.slowest.is_empty() {
        html.heading(place.prefix, ("slowest", "Slowest"), "The slowest requests");
        html.chart("waterfall", place.run);
    }
}

/// Returns the table of layers in the order of a request's path, then the total.
fn layers(place: Place, exact: &Exact) -> Table {
    let tail = exact.layers.iter().any(|row| row.tail_mean.is_some());
    let mut table = Table::new(place.id("layers-table"), HEADINGS);
    let times: Vec<&Distribution> = exact.layers.iter().map(|row| &row.time).collect();
    let times: Vec<&Distribution> = times.into_iter().chain([&exact.total]).collect();
    let layers = exact.layers.iter().map(|row| row.layer);
    let names = layers.map(|layer| Cell::Layer(layer, exact.is_gap(layer)));
    let shares = exact.layers.iter().map(|row| Cell::Share(row.share));
    let mut columns = vec![names.chain([Cell::Text("total".into())]).collect()];
    columns.extend(distribution(&times));
    columns.push(shares.chain([Cell::Number(percent(1.0))]).collect());
    if tail {
        table.add_column("slowest 1%: mean");
        table.add_column("share");
        columns.extend(tail_columns(exact));
    }
    table.totalled(rows(columns));
    table
}

/// Returns the columns N, mean, p50, p90, p99, p99.9 and max; times are in us.
fn distribution(times: &[&Distribution]) -> Vec<Vec<Cell>> {
    let column = |of: fn(&Distribution) -> Option<f64>| {
        numbers(micros(
            &times.iter().map(|time| of(time)).collect::<Vec<_>>(),
        ))
    };
    vec![
        numbers(times.iter().map(|time| time.count.to_string()).collect()),
        column(|time| Some(time.mean)),
        column(|time| time.p50.map(|ns| ns as f64)),
        column(|time| time.p90.map(|ns| ns as f64)),
        column(|time| time.p99.map(|ns| ns as f64)),
        column(|time| time.p999.map(|ns| ns as f64)),
        column(|time| Some(time.max as f64)),
    ]
}

fn tail_columns(exact: &Exact) -> [Vec<Cell>; 2] {
    let means: Vec<Option<f64>> = exact.layers.iter().map(|row| row.tail_mean).collect();
    let total: f64 = means.iter().flatten().sum();
    let means: Vec<Option<f64>> = means.into_iter().chain([Some(total)]).collect();
    let share = |row: &LayerRow| match row.tail_share {
        Some(share) => Cell::Share(share),
        None => Cell::Number("-".into()),
    };
    let shares = exact.layers.iter().map(share);
    [
        numbers(micros(&means)),
        shares.chain([Cell::Number(percent(1.0))]).collect(),
    ]
}

/// Returns the table of groups; the group's mean is the sum of its layers' means.
fn by_group(place: Place, exact: &Exact) -> Table {
    let mut table = Table::new(place.id("groups-table"), &["Group", "mean", "share"]);
    let means = groups(exact, |row| row.time.mean);
    let column =
        |sums: &[(_, f64)]| numbers(micros(&sums.iter().map(|s| Some(s.1)).collect::<Vec<_>>()));
    let shares = |sums: &[(_, f64)]| sums.iter().map(|s| Cell::Share(s.1)).collect();
    let names = means
        .iter()
        .map(|(group, _)| Cell::Coloured(group_colour(*group), group_name(*group).to_owned()));
    let mut columns = vec![
        names.collect(),
        column(&means),
        shares(&groups(exact, |row| row.share)),
    ];
    if exact.layers.iter().any(|row| row.tail_mean.is_some()) {
        table.add_column("slowest 1%: mean");
        table.add_column("share");
        columns.push(column(&groups(exact, |row| row.tail_mean.unwrap_or(0.0))));
        columns.push(shares(&groups(exact, |row| row.tail_share.unwrap_or(0.0))));
    }
    for cells in rows(columns) {
        table.row(cells);
    }
    table
}

fn wiki_tables(html: &mut Html, place: Place, wiki: &Wiki) {
    html.heading(place.prefix, ("wiki", "Wiki"), "The KVM wiki\u{2019}s way");
    html.note(
        "The arithmetic of 2010, on the same data: the mean latency of each layer, and the \
         differences of successive ones.",
    );
    html.raw("<div class=\"beside\">\n");
    let headings = [
        "Layer",
        "Cumulative latency (ns)",
        "Guest benchmark control (ns)",
    ];
    let mut table = Table::new(place.id("wiki-cumulative"), &headings);
    for (layer, ns, control) in &wiki.cumulative {
        table.row(vec![
            Cell::Text(layer.clone()),
            Cell::Number(format!("{ns:.0}")),
            Cell::Number(control.map_or(String::new(), |ns| format!("{ns:.0}"))),
        ]);
    }
    table.show(html);
    let headings = ["Layer", "Delta (ns)", "Delta (%)"];
    let mut table = Table::new(place.id("wiki-delta"), &headings);
    for (layer, ns, percent) in &wiki.delta {
        table.row(vec![
            Cell::Coloured(group_colour(wiki_group(layer)), layer.clone()),
            Cell::Number(format!("{ns:.0}")),
            Cell::Number(format!("{percent:.2}%")),
        ]);
    }
    if !table.is_empty() {
        table.show(html);
    }
    html.raw("</div>\n");
    for note in &wiki.notes {
        html.note(note);
    }
}
