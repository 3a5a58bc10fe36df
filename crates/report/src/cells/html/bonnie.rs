//! bonnie++'s table: two columns for each phase, and a row for each point.

use crate::cells::bonnie::{self, Entry, PARTS, Part, Phase};
use crate::cells::table::{Point, Table};
use crate::cells::words::MOST_ROWS;
use crate::render::html::markup::Html;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let parts = PARTS.iter().enumerate();
    let parts: Vec<_> = parts.filter(|(_, part)| part.is_in(table)).collect();
    if parts.is_empty() {
        return;
    }
    html.heading(prefix, ("bonnie", "bonnie++"), "bonnie++");
    html.note(&bonnie::explained(table));
    for (number, part) in parts {
        html.raw("<div class=\"scroll\">");
        html.open("table", &[("id", &format!("{prefix}bonnie-{number}"))]);
        headings(html, part);
        html.raw("<tbody>\n");
        for point in table.points.iter().take(MOST_ROWS) {
            row(html, part, point);
        }
        html.raw("</tbody></table></div>\n");
    }
}

fn headings(html: &mut Html, part: &Part) {
    let across = |html: &mut Html, columns: usize, text: &str| {
        html.element("th", &[("colspan", &columns.to_string())], text);
    };
    html.raw("<thead><tr><th></th>");
    for group in part.groups {
        across(html, 2 * group.phases.len(), group.heading);
    }
    html.raw("</tr>\n<tr><th></th>");
    for phase in part.phases() {
        across(html, 2, phase.heading);
    }
    html.raw("</tr>\n<tr><th></th>");
    for phase in part.phases() {
        html.element("th", &[("class", "number")], phase.unit());
        html.element("th", &[("class", "number")], "%CP");
    }
    html.raw("</tr></thead>\n");
}

fn row(html: &mut Html, part: &Part, point: &Point) {
    html.raw("<tr>");
    html.element("td", &[], &bonnie::label(&point.settings));
    for phase in part.phases() {
        cells(html, phase, point);
    }
    html.raw("</tr>\n");
}

fn cells(html: &mut Html, phase: &Phase, point: &Point) {
    let Entry {
        rate,
        cpu,
        latency,
        ratio,
        interval,
    } = phase.entry(point);
    html.raw("<td class=\"number\">");
    html.text(&rate);
    for (text, of) in [(latency, "latency"), (ratio, ""), (interval, "")] {
        if !text.is_empty() {
            html.element("small", &[], format!("{of} {text}").trim());
        }
    }
    html.raw("</td>");
    html.element("td", &[("class", "number")], &cpu);
}
