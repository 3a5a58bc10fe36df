//! The top of a run: the answer, where the time goes in a sentence, warnings, and the most
//! important figures.

use super::markup::Html;
use super::words::{duration, group_colour, grouped, layer_colour, layer_key, plural};
use crate::analysis::{Analysis, Exact, Group, LayerRow};
use crate::render::answer::Answer;
use crate::render::text::percent;
use crate::render::verdict::Piece;
use crate::render::{facts, names};

/// Maximum number of problems in an open list; longer lists are folded.
const PROBLEMS_SHOWN: usize = 4;

/// Shows the answer of a run, and the errors that forbid to trust it.
pub(super) fn answer(html: &mut Html, answer: &Answer) {
    html.raw("<p class=\"verdict\">");
    for piece in &answer.sentence {
        match piece {
            Piece::Text(text) => html.text(text),
            Piece::Layer(layer, name) => {
                html.open("span", &[("data-key", &layer_key(*layer))]);
                html.swatch(&layer_colour(*layer));
                html.element("strong", &[], name);
                html.close("span");
            }
        }
    }
    html.raw("</p>\n");
    if let Some(advice) = answer.advice {
        html.note(advice);
    }
    for error in &answer.errors {
        warning(html, "warning bad", "Error.", error);
    }
}

/// Shows where the time goes in a sentence, warnings, and the most important figures.
pub(super) fn show(html: &mut Html, run: &Analysis) {
    if let Some(exact) = run.exact.as_ref().filter(|exact| exact.total.count > 0) {
        sentence(html, exact);
    }
    warnings(html, run);
    tiles(html, run);
}

/// Returns the sum of `of` for each group, in the order of the groups' first layers.
pub(super) fn groups(exact: &Exact, of: fn(&LayerRow) -> f64) -> Vec<(Group, f64)> {
    let mut sums: Vec<(Group, f64)> = Vec::new();
    for row in &exact.layers {
        match sums.iter_mut().find(|(group, _)| *group == row.group) {
            Some((_, sum)) => *sum += of(row),
            None => sums.push((row.group, of(row))),
        }
    }
    sums
}

fn sorted(mut sums: Vec<(Group, f64)>) -> Vec<(Group, f64)> {
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    sums
}

fn sentence(html: &mut Html, exact: &Exact) {
    let total = exact.total.mean;
    let shares = sorted(groups(exact, |row| row.time.mean));
    html.raw(if saw_guest(exact) {
        "<p class=\"lead\">A request takes "
    } else {
        "<p class=\"lead\">As the host sees it, a request takes "
    });
    html.element("strong", &[], &duration(total));
    html.raw(" on average: ");
    let told = shares.iter().filter(|(_, ns)| *ns >= total / 100.0);
    for (i, (group, ns)) in told.enumerate() {
        if i > 0 {
            html.raw(", ");
        }
        html.open("span", &[("class", "term")]);
        html.swatch(&group_colour(*group));
        html.element("strong", &[], &percent(ns / total.max(1.0)));
        html.raw(" ");
        html.text(in_sentence(*group));
        html.raw("</span>");
    }
    html.raw(".</p>\n");
}

/// Returns whether the guest was watched, and not the host alone.
pub(super) fn saw_guest(exact: &Exact) -> bool {
    exact.layers.iter().any(|row| row.group == Group::Guest)
}

fn in_sentence(group: Group) -> &'static str {
    match group {
        Group::Guest => "guest",
        Group::Switching => "host/guest switching",
        Group::ServerSwitching => "host/server switching",
        Group::Server => "the disk's server",
        Group::Network => "the network",
        Group::RemoteServer => "the remote server",
        Group::RemoteIo => "the remote server's I/O",
        Group::HostIo => "host I/O",
        Group::Device => "the device, as the guest sees it",
        Group::Unattributed => "unattributed",
    }
}

pub(crate) fn warning(html: &mut Html, class: &'static str, title: &'static str, text: &str) {
    html.open("div", &[("class", class), ("role", "note")]);
    html.element("strong", &[], title);
    html.raw(" ");
    html.text(text);
    html.raw("</div>\n");
}

fn warnings(html: &mut Html, run: &Analysis) {
    if let Some(exact) = &run.exact {
        if !exact.truth.lost.is_empty() {
            let text = format!(
                "{}: p99, p99.9, maxima and the slowest requests are INVALID; means and medians \
                 miss the dropped requests.",
                facts::lost(&exact.truth, grouped)
            );
            warning(html, "warning bad", "Events were dropped.", &text);
        }
        doubts(html, exact);
    }
    if run.environment.stretched {
        let text = "The host is itself emulated: times verify the method and say nothing about \
                    speed.";
        warning(html, "warning", "Times are stretched.", text);
    }
}

fn doubts(html: &mut Html, exact: &Exact) {
    if exact.truth.violations > 0 {
        let count = plural(exact.truth.violations, "effect");
        let text = format!("{count} seen before their causes, by more than the clocks' error.");
        warning(html, "warning", "Clocks disagree.", &text);
    }
    let negative = exact.layers.iter().filter(|row| row.negative > 0);
    let named: Vec<String> = negative
        .map(|row| format!("{} ({})", row.name, plural(row.negative, "request")))
        .collect();
    if !named.is_empty() {
        let text = format!(
            "{}. The clocks' error or a wrong join makes that.",
            named.join(", ")
        );
        warning(html, "warning", "Layers below zero:", &text);
    }
}

/// Lists the problems of a run, folded if the list is long.
pub(crate) fn problems(html: &mut Html, problems: &[String]) {
    let list = |html: &mut Html| {
        html.raw("<ul>");
        for problem in problems {
            html.element("li", &[], problem);
        }
        html.raw("</ul>");
    };
    match problems.len() {
        0 => {}
        1..=PROBLEMS_SHOWN => {
            html.raw("<div class=\"warning mild\" role=\"note\"><strong>Problems</strong>");
            list(html);
            html.raw("</div>\n");
        }
        count => {
            html.raw("<details class=\"warning mild\"><summary>");
            html.text(&format!("{count} problems of this run"));
            html.raw("</summary>");
            list(html);
            html.raw("</details>\n");
        }
    }
}

fn tiles(html: &mut Html, run: &Analysis) {
    html.raw("<dl class=\"tiles\">\n");
    if let Some(exact) = &run.exact {
        let total = &exact.total;
        tile(html, "mean", &duration(total.mean), "");
        for (name, value) in [
            ("median", total.p50),
            ("p99", total.p99),
            ("p99.9", total.p999),
        ] {
            if let Some(ns) = value {
                tile(html, name, &duration(ns as f64), "");
            }
        }
        tile(html, "slowest", &duration(total.max as f64), "");
        let joined = format!("of {}", grouped(exact.truth.requests));
        tile(
            html,
            "requests followed",
            &grouped(exact.truth.joined),
            &joined,
        );
    }
    for cost in &run.overhead {
        let base = cost.untraced_ns.max(1.0);
        let percent = format!("{:+.0}%", cost.difference_ns / base * 100.0);
        tile(
            html,
            "cost of tracing",
            &percent,
            &facts::collectors(&cost.traced),
        );
    }
    html.raw("</dl>\n");
}

fn tile(html: &mut Html, name: &str, value: &str, note: &str) {
    html.raw("<div><dt>");
    html.text(name);
    html.raw("</dt><dd>");
    html.text(value);
    if !note.is_empty() {
        html.element("small", &[], note);
    }
    html.raw("</dd></div>\n");
}

/// Returns a group's name in tables.
pub(super) fn group_name(group: Group) -> &'static str {
    names::group(group)
}
