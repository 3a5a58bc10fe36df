//! Several runs side by side: the first is the base, the others have their differences to it.

use super::page::Page;
use super::{Style, environment, truth};
use crate::analysis::{Analysis, Distribution, Layer, LayerRow};
use crate::render::text::{Table, micros};

/// Runs next to the base that fit the width; more begin another table.
const BESIDE: usize = 2;
/// Runs have letters; there are this many.
const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// Compares runs, each with what people call it (its directory).
///
/// Runs beyond the 26th are left out, and that is said.
pub fn compare(runs: &[(String, Analysis)], style: Style) -> String {
    let mut page = Page::new(style);
    let shown = &runs[..runs.len().min(LETTERS.len())];
    page.heading("Runs compared");
    for (i, (name, run)) in shown.iter().enumerate() {
        page.fact(&letter(i), &format!("{name}: {}", run.title));
    }
    if shown.len() < runs.len() {
        page.warning(&format!(
            "{} more runs are left out.",
            runs.len() - shown.len()
        ));
    }
    differences(&mut page, shown);
    for (i, (_, run)) in shown.iter().enumerate() {
        warnings(&mut page, &letter(i), run);
    }
    let Some((first, others)) = shown.split_first() else {
        return page.finish();
    };
    let starts = (0..others.len()).step_by(BESIDE);
    let parts: Vec<_> = starts
        .map(|at| (at, &others[at..others.len().min(at + BESIDE)]))
        .collect();
    section(&mut page, "Layers, mean (us)", first, &parts, |time| {
        Some(time.mean)
    });
    section(&mut page, "Layers, p99 (us)", first, &parts, |time| {
        Some(time.p99? as f64)
    });
    wiki(&mut page, shown);
    page.finish()
}

fn letter(i: usize) -> String {
    char::from(LETTERS[i % LETTERS.len()]).to_string()
}

/// Facts of the environment that are not the same in all runs.
fn differences(page: &mut Page, runs: &[(String, Analysis)]) {
    type Fact = (&'static str, fn(&Analysis) -> String);
    let facts: &[Fact] = &[
        ("guest", |run| {
            let guest = run.environment.guest.as_ref();
            guest.map_or("-".into(), environment::machine)
        }),
        ("host", |run| environment::machine(&run.environment.host)),
        ("accelerator", |run| run.environment.accelerator.clone()),
        ("QEMU", |run| {
            run.environment.qemu.clone().unwrap_or("-".into())
        }),
        ("Fathom", |run| run.environment.fathom.clone()),
        ("workload", |run| {
            run.scenario
                .as_ref()
                .map_or("-".into(), environment::workload)
        }),
        ("server", |run| {
            run.scenario
                .as_ref()
                .map_or("-".into(), environment::server)
        }),
    ];
    for (name, of) in facts {
        let values: Vec<String> = runs.iter().map(|(_, run)| of(run)).collect();
        if values.windows(2).all(|pair| pair[0] == pair[1]) {
            continue;
        }
        for (i, value) in values.iter().enumerate() {
            let name = if i == 0 { name } else { "" };
            page.fact(name, &format!("{}: {value}", letter(i)));
        }
    }
}

fn warnings(page: &mut Page, letter: &str, run: &Analysis) {
    if run.environment.stretched {
        page.warning(&format!(
            "{letter}: times are stretched: its host is itself emulated."
        ));
    }
    match &run.exact {
        None => page.warning(&format!("{letter} has no exact breakdown.")),
        Some(exact) if !exact.truth.lost.is_empty() => page.warning(&format!(
            "{letter} lost {}: its tails are INVALID.",
            truth::lost(&exact.truth)
        )),
        Some(_) => {}
    }
}

type Part<'a> = (usize, &'a [(String, Analysis)]);

fn section(
    page: &mut Page,
    heading: &str,
    first: &(String, Analysis),
    parts: &[Part],
    of: fn(&Distribution) -> Option<f64>,
) {
    page.heading(heading);
    for (i, (at, others)) in parts.iter().enumerate() {
        if i > 0 {
            page.gap();
        }
        page.table(&layers(first, *at, others, of));
    }
}

/// Layers x runs, and the totals; a run without a layer has `-` there.
fn layers(
    first: &(String, Analysis),
    at: usize,
    others: &[(String, Analysis)],
    of: fn(&Distribution) -> Option<f64>,
) -> Table {
    let runs: Vec<&Analysis> = std::iter::once(first)
        .chain(others)
        .map(|(_, run)| run)
        .collect();
    let present: Vec<Layer> = Layer::ALL
        .iter()
        .copied()
        .filter(|&layer| runs.iter().any(|run| row(run, layer).is_some()))
        .collect();
    let mut names: Vec<String> = present
        .iter()
        .map(|layer| layer.describe().0.to_owned())
        .collect();
    names.push("total".into());
    let column = |run: &Analysis| -> Vec<Option<f64>> {
        let layers = present.iter().map(|&layer| of(&row(run, layer)?.time));
        let total = run.exact.as_ref().and_then(|exact| of(&exact.total));
        layers.chain([total]).collect()
    };
    let base = column(runs[0]);
    let mut table = Table::new(1, &["Layer", "A"]);
    let mut columns = vec![names, micros(&base)];
    for (i, run) in runs[1..].iter().enumerate() {
        let letter = letter(at + i + 1);
        table.add_column(letter.clone());
        table.add_column(format!("{letter} - A"));
        table.add_column("");
        let values = column(run);
        columns.push(micros(&values));
        columns.extend(difference(&base, &values));
    }
    table.columns(&columns);
    table
}

/// The difference to the base, in us and in percent of the base.
fn difference(base: &[Option<f64>], values: &[Option<f64>]) -> [Vec<String>; 2] {
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
    [signed.collect(), percents.collect()]
}

fn row(run: &Analysis, layer: Layer) -> Option<&LayerRow> {
    let layers = &run.exact.as_ref()?.layers;
    layers.iter().find(|row| row.layer == layer)
}

/// The wiki's deltas of all runs, in its rows' order.
fn wiki(page: &mut Page, runs: &[(String, Analysis)]) {
    let mut names: Vec<&str> = Vec::new();
    for (_, run) in runs {
        for (name, _, _) in run.wiki.iter().flat_map(|wiki| &wiki.delta) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
    }
    if names.is_empty() {
        return;
    }
    page.heading("The wiki's way, delta (us)");
    for (i, part) in runs.chunks(6).enumerate() {
        if i > 0 {
            page.gap();
        }
        let mut table = Table::new(1, &["Layer"]);
        let mut columns = vec![names.iter().map(|&name| name.to_owned()).collect()];
        for (j, (_, run)) in part.iter().enumerate() {
            table.add_column(letter(i * 6 + j));
            let delta = |name: &&str| {
                let rows = &run.wiki.as_ref()?.delta;
                rows.iter().find(|row| row.0 == *name).map(|row| row.1)
            };
            columns.push(micros(&names.iter().map(delta).collect::<Vec<_>>()));
        }
        table.columns(&columns);
        page.table(&table);
    }
}
