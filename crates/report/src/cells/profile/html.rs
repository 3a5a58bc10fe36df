//! Symbol tables and flame graphs on a page.

use fathom_run::evidence::LockWait;

use super::flame::{self, Graph};
use super::{Sampled, parts_of};
use crate::cells::compare::Comparison;
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::html::markup::{self, Cell, Html};
use crate::render::text::plural;

/// Maximum number of points on a page; each has several graphs of about 100 kB.
const MOST_POINTS: usize = 16;

/// Shows the profiles of one run.
pub(in crate::cells) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let sampled = table
        .points
        .iter()
        .filter(|point| !point.profile.is_empty());
    for (number, point) in sampled.clone().enumerate().take(MOST_POINTS) {
        if number == 0 {
            html.heading(prefix, ("profile", "CPU"), "Where the CPU goes");
            html.note(
                "Percent of the samples in which the CPU ran the symbol itself, without its callees. \
                 Idle CPUs are left out. In a flame graph, a frame is as wide as its share of the \
                 samples: click on a frame to see the frames above it.",
            );
        }
        html.element("h3", &[], &words::label(&point.settings));
        for sampled in &point.profile {
            symbols(
                html,
                &format!("{prefix}profile-{number}-{}", sampled.side),
                sampled,
            );
            for (title, folded) in parts_of(sampled) {
                show_graph(html, title, flame::graph(title, &folded));
            }
        }
        locks(
            html,
            &format!("{prefix}profile-{number}-locks"),
            &point.locks,
        );
    }
    more(html, sampled.count());
}

/// Shows differential flame graphs from run A to run B.
pub(in crate::cells) fn compare(html: &mut Html, comparison: &Comparison) {
    let both = |one: &&crate::cells::Compared| one.profiles.iter().all(|side| !side.is_empty());
    let points = comparison.points.iter().filter(both);
    for (number, point) in points.clone().enumerate().take(MOST_POINTS) {
        if number == 0 {
            html.heading("", ("profile", "CPU"), "Where the CPU goes differently");
            html.note(
                "Frames are as wide as in B. Red ones have a greater share of B's samples than of \
                 A's, blue ones a smaller share.",
            );
        }
        html.element("h3", &[], &words::label(&point.settings));
        let [a, b] = &point.profiles;
        for (title, b) in b.iter().flat_map(parts_of) {
            let mut others = a.iter().flat_map(parts_of);
            if let Some((_, a)) = others.find(|(other, _)| *other == title) {
                show_graph(html, title, flame::difference(title, &a, &b));
            }
        }
    }
    more(html, points.count());
}

fn more(html: &mut Html, points: usize) {
    if points > MOST_POINTS {
        let more = plural((points - MOST_POINTS) as u64, "more point");
        html.note(&format!(
            "And {more}, whose cells have their samples as folded stacks."
        ));
    }
}

fn symbols(html: &mut Html, id: &str, sampled: &Sampled) {
    let samples = plural(sampled.samples, "sample");
    html.note(&format!("{}: {samples}", sampled.side));
    let headings = ["overhead", "command", "object", "symbol"];
    let mut table = markup::Table::new(id.to_owned(), &headings);
    for one in &sampled.top {
        table.row(vec![
            Cell::Number(format!("{:.2}%", one.overhead)),
            Cell::Text(one.command.clone()),
            Cell::Text(one.object.clone()),
            Cell::Code(one.symbol.clone()),
        ]);
    }
    table.show(html);
}

fn locks(html: &mut Html, id: &str, locks: &[LockWait]) {
    if locks.is_empty() {
        return;
    }
    html.note("Waiting for the kernel's locks, of all threads together:");
    let headings = ["side", "lock and caller", "waits", "ms"];
    let mut table = markup::Table::new(id.to_owned(), &headings);
    for one in locks {
        table.row(vec![
            Cell::Text(one.side.clone()),
            Cell::Code(one.name.clone()),
            Cell::Number(one.waits.to_string()),
            Cell::Number(format!("{:.3}", one.seconds * 1e3)),
        ]);
    }
    table.show(html);
}

fn show_graph(html: &mut Html, title: &str, graph: Option<Graph>) {
    let Some(Graph { document, height }) = graph else {
        return;
    };
    html.raw("<details class=\"flame\" open>");
    html.element("summary", &[], title);
    html.document(title, height, &document);
    html.raw("</details>\n");
}
