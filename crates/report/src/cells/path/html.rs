//! Paths on a page: stacks side by side, with arrows between them.

use fathom_run::folded::{is_kernel, parts};
use fathom_run::{RequestPath, Side};

use super::{Step, between, said};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::html::markup::{Cell, Html, Table as Rows};
use crate::render::text::plural;

/// Maximum number of points on a page.
const MOST_POINTS: usize = 16;
const WIDTH: f64 = 900.0;
const LEFT: f64 = 10.0;
/// Space between two columns, for an arrow.
const GAP: f64 = 36.0;
const ROW: f64 = 15.0;
/// Space between two stacks of a column.
const BELOW: f64 = 34.0;
/// Width of a character in the monospaced font of 11 pixels.
const CHARACTER: f64 = 6.7;

pub(in crate::cells) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, point.path.as_ref()?)));
    let count = with.clone().count();
    for (number, (point, path)) in with.take(MOST_POINTS).enumerate() {
        if number == 0 {
            html.heading(prefix, ("path", "Path"), "The path of a request");
            html.note(
                "The call stacks with which requests reached a device, from the program at the top \
                 to the device. Grey: user space. In colour: the guest's kernel, and that of \
                 the host. Times are means.",
            );
        }
        html.element("h3", &[], &words::label(&point.settings));
        html.raw("<div class=\"scroll\">");
        picture(html, &Step::all(path));
        html.raw("</div>\n");
        counts(html, format!("{prefix}path-{number}"), path);
    }
    if count > MOST_POINTS {
        let more = plural((count - MOST_POINTS) as u64, "more point");
        html.note(&format!("And {more}, which JSON has."));
    }
}

fn counts(html: &mut Html, id: String, path: &RequestPath) {
    let (headings, rows) = between(path);
    let mut table = Rows::new(id, &headings);
    for row in rows {
        let mut cells = row.into_iter();
        let name = Cell::Text(cells.next().unwrap_or_default());
        table.row(
            std::iter::once(name)
                .chain(cells.map(Cell::Number))
                .collect(),
        );
    }
    table.show(html);
}

/// Returns a column for each side; if there is only one side, a column for each stack.
fn columns<'a, 'b>(steps: &'b [Step<'a>]) -> Vec<&'b [Step<'a>]> {
    let of_both = steps.chunk_by(|one, next| one.side == next.side);
    match of_both.clone().count() {
        1 => steps.chunks(1).collect(),
        _ => of_both.collect(),
    }
}

fn height(step: &Step) -> f64 {
    let lines = 1 + step.stack.frames.len() + step.notes.len();
    lines as f64 * ROW + BELOW
}

fn picture(html: &mut Html, steps: &[Step]) {
    let columns = columns(steps);
    let heights = columns.iter().map(|column| column.iter().map(height).sum());
    let view = format!("0 0 {WIDTH} {:.0}", heights.fold(0.0, f64::max));
    let attributes = [("viewBox", &*view), ("class", "path"), ("role", "img")];
    html.open("svg", &attributes);
    // A single stack is as wide as one of two.
    let width = (WIDTH - LEFT + GAP) / columns.len().max(2) as f64 - GAP;
    for (number, column) in columns.iter().enumerate() {
        let left = LEFT + number as f64 * (width + GAP);
        let mut y = 0.0;
        for (place, step) in column.iter().enumerate() {
            if place > 0 {
                arrow(html, &[(left + 6.0, y - 14.0), (left + 6.0, y + 16.0)]);
            }
            stack(html, step, (left, y + 20.0, width));
            y += height(step);
        }
        if number + 1 < columns.len() {
            let (gap, end) = (left + width + GAP / 3.0, left + width + GAP - 4.0);
            let (bottom, top) = (y - 6.0, 22.0);
            let begin = left + 6.0;
            arrow(
                html,
                &[
                    (begin, bottom - 12.0),
                    (begin, bottom),
                    (gap, bottom),
                    (gap, top),
                    (end, top),
                ],
            );
        }
    }
    html.raw("</svg>\n");
}

fn stack(html: &mut Html, step: &Step, (left, top, width): (f64, f64, f64)) {
    let fits = ((width - 14.0) / CHARACTER) as usize;
    let mut y = top + 5.0;
    text(html, (left, y), "title", &step.title);
    if let Some(before) = &step.before {
        let x = left + step.title.chars().count() as f64 * CHARACTER + 24.0;
        text(html, (x, y), "note", before);
    }
    for frame in &step.stack.frames {
        y += ROW;
        let (x, at) = (format!("{left:.1}"), format!("{:.1}", y - ROW + 4.0));
        let (high, style) = (
            format!("{ROW}"),
            format!("fill:var({})", colour(step, frame)),
        );
        let place = [
            ("x", &*x),
            ("y", &at),
            ("width", "4"),
            ("height", &high),
            ("style", &style),
        ];
        html.element("rect", &place, "");
        let said = said(frame);
        let is_long = said.chars().count() > fits;
        let clipped: String = said.chars().take(fits.saturating_sub(2)).collect();
        let shown = if is_long {
            format!("{clipped}..")
        } else {
            said.to_owned()
        };
        text(html, (left + 10.0, y), "frame", &shown);
    }
    for note in &step.notes {
        y += ROW;
        text(html, (left, y), "note", note);
    }
}

fn colour(step: &Step, frame: &str) -> &'static str {
    match (is_kernel(parts(frame).1), step.side) {
        (false, _) => "--g-unattributed",
        (true, Side::Guest) => "--g-guest",
        (true, Side::Host) => "--g-host_io",
    }
}

fn text(html: &mut Html, (x, y): (f64, f64), class: &str, words: &str) {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    html.element("text", &[("x", &x), ("y", &y), ("class", class)], words);
}

/// Draws a line through these points, with an arrow head at the last one.
fn arrow(html: &mut Html, points: &[(f64, f64)]) {
    let words = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
    let line = words.collect::<Vec<_>>().join(" ");
    html.element("polyline", &[("points", &line)], "");
    if let [.., (from, _), (x, y)] = points {
        let head = match from == x {
            true => [(x - 3.5, y - 6.0), (x + 3.5, y - 6.0), (*x, *y)],
            false => [(x - 6.0, y - 3.5), (x - 6.0, y + 3.5), (*x, *y)],
        };
        let head = head.map(|(x, y)| format!("{x:.1},{y:.1}")).join(" ");
        html.element("polygon", &[("points", &head)], "");
    }
}
