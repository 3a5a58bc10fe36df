//! The exact breakdown: every layer of every request.

use super::page::{Bar, Page};
use crate::analysis::{Distribution, Exact, Group, LayerRow};
use crate::render::names;
use crate::render::text::{Table, duration, micros, percent, plural};

const HEADER: &[&str] = &[
    "Layer", "N", "mean", "p50", "p90", "p99", "p99.9", "max", "share",
];

/// Shows the mean time of each layer as a bar, in the order of a request's path.
pub(super) fn picture(page: &mut Page, exact: &Exact) {
    if exact.total.count == 0 {
        return;
    }
    let total = duration(exact.total.mean);
    page.heading(&format!("Where a request of {total} spends its time (us)"));
    let means: Vec<Option<f64>> = { exact.layers.iter() }
        .map(|row| Some(row.time.mean))
        .collect();
    let bars = exact
        .layers
        .iter()
        .zip(micros(&means))
        .map(|(row, mean)| Bar {
            label: row.name.to_owned(),
            figures: vec![mean, percent(row.share)],
            length: row.time.mean,
        });
    page.bars(&bars.collect::<Vec<Bar>>());
    page.note(&tail(exact));
}

pub(super) fn tables(page: &mut Page, exact: &Exact) {
    page.heading("Every request followed through all layers (us)");
    page.table(&layers(exact));
    if let Some(negative) = negative(&exact.layers) {
        page.warning(&negative);
    }
    page.gap();
    page.table(&groups(exact));
}

/// Returns the table of layers in the order of a request's path, then the total.
fn layers(exact: &Exact) -> Table {
    let mut table = Table::new(1, HEADER);
    let times = || {
        exact
            .layers
            .iter()
            .map(|row| &row.time)
            .chain([&exact.total])
    };
    let names = exact.layers.iter().map(|row| row.name.to_owned());
    let shares = exact.layers.iter().map(|row| percent(row.share));
    let column =
        |of: fn(&Distribution) -> Option<f64>| micros(&times().map(of).collect::<Vec<_>>());
    table.columns(&[
        names.chain(["total".to_owned()]).collect(),
        times().map(|time| time.count.to_string()).collect(),
        column(|time| Some(time.mean)),
        column(|time| time.p50.map(|ns| ns as f64)),
        column(|time| time.p90.map(|ns| ns as f64)),
        column(|time| time.p99.map(|ns| ns as f64)),
        column(|time| time.p999.map(|ns| ns as f64)),
        column(|time| Some(time.max as f64)),
        shares.chain([percent(1.0)]).collect(),
    ]);
    table
}

fn negative(layers: &[LayerRow]) -> Option<String> {
    let negative = layers.iter().filter(|row| row.negative > 0);
    let named: Vec<String> = negative
        .map(|row| format!("{} ({})", row.name, plural(row.negative, "request")))
        .collect();
    (!named.is_empty()).then(|| {
        format!(
            "Negative in some requests, which the clocks' error or a wrong join makes: {}.",
            named.join(", ")
        )
    })
}

/// Returns the table of groups, in the order of their first layers. A group's mean is the sum of
/// its layers' means.
fn groups(exact: &Exact) -> Table {
    let mut table = Table::new(1, &["Group", "mean", "share"]);
    let tail = exact.layers.iter().all(|row| row.tail_mean.is_some());
    if tail {
        table.add_column("mean of the slowest 1%");
        table.add_column("share there");
    }
    let mut order: Vec<Group> = Vec::new();
    for row in &exact.layers {
        if !order.contains(&row.group) {
            order.push(row.group);
        }
    }
    let sum = |group: Group, of: fn(&LayerRow) -> f64| -> f64 {
        let rows = exact.layers.iter().filter(|row| row.group == group);
        rows.map(of).sum()
    };
    let column = |of: fn(&LayerRow) -> f64| -> Vec<Option<f64>> {
        order.iter().map(|&group| Some(sum(group, of))).collect()
    };
    let shares = |of: fn(&LayerRow) -> f64| -> Vec<String> {
        order.iter().map(|&group| percent(sum(group, of))).collect()
    };
    let mut columns = vec![
        order
            .iter()
            .map(|group| names::group(*group).to_owned())
            .collect(),
        micros(&column(|row| row.time.mean)),
        shares(|row| row.share),
    ];
    if tail {
        columns.push(micros(&column(|row| row.tail_mean.unwrap_or(0.0))));
        columns.push(shares(|row| row.tail_share.unwrap_or(0.0)));
    }
    table.columns(&columns);
    table
}

/// Describes the layer that dominates the slowest requests.
fn tail(exact: &Exact) -> String {
    let share = |row: &LayerRow| row.tail_share.unwrap_or(0.0);
    let most = exact.layers.iter().filter(|row| row.tail_share.is_some());
    let Some(most) = most.max_by(|a, b| share(a).total_cmp(&share(b))) else {
        let count = exact.total.count;
        return format!(
            "Too few requests ({count}) to say which layer dominates the tail: the slowest 1% must \
             be ten or more."
        );
    };
    let above = match exact.total.p99 {
        Some(p99) => format!(" (above {})", duration(p99 as f64)),
        None => String::new(),
    };
    format!(
        "The tail: in the slowest 1%{above}, '{}' takes {} of the time, {} a request; over all \
         requests it takes {}, {}.",
        most.name,
        percent(share(most)),
        duration(most.tail_mean.unwrap_or(0.0)),
        percent(most.share),
        duration(most.time.mean),
    )
}
