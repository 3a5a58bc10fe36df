//! The facts of a run: reliability, rounds and setup.

use super::layers::Place;
use super::markup::{Cell, Html, Table, numbers, rows};
use super::words::{duration, grouped};
use crate::analysis::{Analysis, Exact, Overhead, RoundRow, Truth};
use crate::render::facts;
use crate::render::text::micros;

/// Largest share of faulty requests in a good join, from the goal for a join at depth 1.
const GOOD: f64 = 0.001;

pub(super) fn show(html: &mut Html, place: Place, run: &Analysis) {
    if let Some(exact) = &run.exact {
        html.heading(place.prefix, ("truth", "Trust"), "Reliability");
        truth(place, exact).show(html);
    }
    rounds(html, place, run);
    html.heading(place.prefix, ("environment", "Environment"), "Setup");
    environment(html, place, run);
}

/// Returns the table of checks of the join: what was found, and whether it is good.
fn truth(place: Place, exact: &Exact) -> Table {
    let truth = &exact.truth;
    let mut table = Table::new(place.id("truth-table"), &["", "Check", "Found"]);
    let share = |count: u64| count as f64 / truth.requests.max(1) as f64;
    let counted = |count: u64| format!("{} ({:.2}%)", grouped(count), share(count) * 100.0);
    let mut row = |good: Option<bool>, check: &str, found: String| {
        let (class, mark) = match good {
            Some(true) => ("good", "\u{2713}"),
            Some(false) => ("doubt", "!"),
            None => ("", ""),
        };
        let cells = [mark.to_owned(), check.to_owned(), found];
        table.classed(class, cells.map(Cell::Text).to_vec());
    };
    let joined = format!("{} of {}", grouped(truth.joined), grouped(truth.requests));
    row(
        Some(share(truth.unmatched) <= GOOD),
        "requests followed",
        joined,
    );
    for (check, count) in [
        ("without their counterpart", truth.unmatched),
        (
            "with more than one possible counterpart, taken first in, first out",
            truth.ambiguous,
        ),
        ("without a point that was watched", truth.incomplete),
    ] {
        row(Some(share(count) <= GOOD), check, counted(count));
    }
    let none = |count: u64| Some(count == 0);
    row(
        none(truth.inconsistent),
        "events that contradict the others",
        grouped(truth.inconsistent),
    );
    row(
        none(truth.violations),
        "effects before their causes, by more than the clocks' error",
        grouped(truth.violations),
    );
    row(
        Some(truth.lost.is_empty()),
        "events dropped",
        dropped(truth),
    );
    row(None, "clocks", facts::clocks(truth, duration));
    row(
        None,
        "how requests reached the server",
        facts::delivery(truth),
    );
    row(
        None,
        "result in the host's block layer",
        facts::hosts(truth, grouped),
    );
    table
}

fn dropped(truth: &Truth) -> String {
    match truth.lost.is_empty() {
        true => "none".to_owned(),
        false => facts::lost(truth, grouped),
    }
}

fn rounds(html: &mut Html, place: Place, run: &Analysis) {
    if run.rounds.is_empty() && run.overhead.is_empty() {
        return;
    }
    html.heading(place.prefix, ("rounds", "Rounds"), "Rounds");
    if !run.overhead.is_empty() {
        html.note(
            "Cost of tracing per request: traced rounds compared with the untraced rounds next to them.",
        );
        overhead(place, &run.overhead).show(html);
    }
    if !run.rounds.is_empty() {
        html.note("The benchmark\u{2019}s own figures, round by round.");
        figures(place, &run.rounds).show(html);
    }
}

fn overhead(place: Place, costs: &[Overhead]) -> Table {
    let headings = [
        "Traced",
        "pairs of rounds",
        "untraced (\u{b5}s)",
        "traced (\u{b5}s)",
        "difference (\u{b5}s)",
        "difference",
        "95% interval",
    ];
    let mut table = Table::new(place.id("overhead-table"), &headings);
    let column = |of: fn(&Overhead) -> f64| {
        numbers(micros(
            &costs.iter().map(|cost| Some(of(cost))).collect::<Vec<_>>(),
        ))
    };
    let relative = |cost: &Overhead| {
        let share = cost.difference_ns / cost.untraced_ns.max(1.0);
        Cell::Number(format!("{:+.1}%", share * 100.0))
    };
    let interval = |cost: &Overhead| {
        Cell::Number(match cost.pairs {
            0 | 1 => "none with one pair".to_owned(),
            _ => format!("{} to {}", duration(cost.low_ns), duration(cost.high_ns)),
        })
    };
    let columns = vec![
        costs
            .iter()
            .map(|cost| Cell::Text(facts::collectors(&cost.traced)))
            .collect(),
        costs
            .iter()
            .map(|cost| Cell::Number(cost.pairs.to_string()))
            .collect(),
        column(|cost| cost.untraced_ns),
        column(|cost| cost.traced_ns),
        column(|cost| cost.difference_ns),
        costs.iter().map(relative).collect(),
        costs.iter().map(interval).collect(),
    ];
    for cells in rows(columns) {
        table.row(cells);
    }
    table
}

fn figures(place: Place, rounds: &[RoundRow]) -> Table {
    let headings = [
        "Round",
        "where",
        "traced",
        "call",
        "operations",
        "errors",
        "mean (\u{b5}s)",
    ];
    let mut table = Table::new(place.id("rounds-table"), &headings);
    let means: Vec<Option<f64>> = rounds
        .iter()
        .map(|round| round.benchmark.as_ref().map(|figures| figures.mean_ns))
        .collect();
    for (round, mean) in rounds.iter().zip(micros(&means)) {
        let figures = round.benchmark.as_ref();
        let number = |of: Option<u64>| Cell::Number(of.map_or("-".into(), grouped));
        table.row(vec![
            Cell::Text(round.name.clone()),
            Cell::Text(if round.on_host { "host" } else { "guest" }.to_owned()),
            Cell::Text(facts::collectors(&round.traced)),
            Cell::Text(figures.map_or(String::new(), |figures| figures.call.clone())),
            number(figures.map(|figures| figures.operations)),
            number(figures.map(|figures| figures.errors)),
            Cell::Number(mean),
        ]);
    }
    table
}

fn environment(html: &mut Html, place: Place, run: &Analysis) {
    html.open(
        "dl",
        &[("class", "facts"), ("id", &place.id("environment-list"))],
    );
    for (name, words) in facts::environment(run) {
        html.element("dt", &[], name);
        html.element("dd", &[], &words);
    }
    html.raw("</dl>\n");
}
