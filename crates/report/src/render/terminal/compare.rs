//! Compares several runs: the first is the base, the others show their differences to it.

use super::Style;
use super::page::{Bar, Page};
use crate::analysis::{Analysis, Distribution};
use crate::impossible;
use crate::render::comparison::{self, letter};
use crate::render::facts;
use crate::render::text::{Table, duration, micros, plain};

/// Number of runs next to the base that fit the width; further runs start another table.
const BESIDE: usize = 2;

/// Compares runs, each with the user's name for it (its directory).
pub fn compare(runs: &[(String, Analysis)], style: Style) -> String {
    let answer = comparison::answer(runs, duration);
    let mut parts = Page::report(style, &answer, None, "Runs compared");
    for (i, (name, run)) in runs.iter().enumerate() {
        parts
            .answer
            .fact(&letter(i), &format!("{name}: {}", run.title));
    }
    for (i, (_, run)) in runs.iter().enumerate() {
        warnings(&mut parts.answer, &letter(i), run);
    }
    let Some((first, others)) = runs.split_first() else {
        return parts.finish().finish();
    };
    picture(&mut parts.picture, runs);
    let starts = (0..others.len()).step_by(BESIDE);
    let beside: Vec<_> = starts
        .map(|at| (at, &others[at..others.len().min(at + BESIDE)]))
        .collect();
    let tables = &mut parts.table;
    section(tables, "Layers, mean (us)", first, &beside, |time| {
        Some(time.mean)
    });
    section(tables, "Layers, p99 (us)", first, &beside, |time| {
        Some(time.p99? as f64)
    });
    wiki(tables, runs);
    differences(&mut parts.environment, runs);
    parts.finish().finish()
}

/// Shows the mean of each run's requests as a bar.
fn picture(page: &mut Page, runs: &[(String, Analysis)]) {
    let totals = { runs.iter().enumerate() }.filter_map(|(i, (_, run))| {
        let exact = run.exact.as_ref().filter(|exact| exact.total.count > 0)?;
        Some((letter(i), exact.total.mean))
    });
    let totals: Vec<(String, f64)> = totals.collect();
    if totals.len() < 2 {
        return;
    }
    let means: Vec<Option<f64>> = totals.iter().map(|(_, mean)| Some(*mean)).collect();
    let bars = totals.into_iter().zip(micros(&means));
    let bars = bars.map(|((label, length), mean)| Bar {
        label,
        figures: vec![mean],
        length,
    });
    page.heading("A request, mean (us)");
    page.bars(&bars.collect::<Vec<Bar>>());
}

/// Shows the facts of the environment that differ between the runs.
fn differences(page: &mut Page, runs: &[(String, Analysis)]) {
    let differences = comparison::differences(runs);
    if !differences.is_empty() {
        page.heading("Differences of the environment");
    }
    for (name, values) in differences {
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
            facts::lost(&exact.truth, plain)
        )),
        Some(_) => {}
    }
    for error in impossible::sums(run.exact.as_ref(), run.wiki.as_ref()) {
        page.warning(&format!("{letter}: {error}"));
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

/// Returns a table of layers by runs, with totals; a layer that a run lacks is `-`.
fn layers(
    first: &(String, Analysis),
    at: usize,
    others: &[(String, Analysis)],
    of: fn(&Distribution) -> Option<f64>,
) -> Table {
    let runs = std::iter::once(first).chain(others).map(|(_, run)| run);
    let present = comparison::present(runs.clone());
    let names = present.iter().map(|layer| layer.describe().0);
    let names = names.chain(["total"]).map(str::to_owned).collect();
    let base = comparison::column(&first.1, &present, of);
    let mut table = Table::new(1, &["Layer", "A"]);
    let mut columns = vec![names, micros(&base)];
    for (i, run) in runs.skip(1).enumerate() {
        let letter = letter(at + i + 1);
        table.add_column(letter.clone());
        table.add_column(format!("{letter} - A"));
        table.add_column("");
        let values = comparison::column(run, &present, of);
        columns.push(micros(&values));
        columns.extend(comparison::difference(&base, &values));
    }
    table.columns(&columns);
    table
}

/// Shows the wiki's deltas of all runs, in the order of its rows.
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
