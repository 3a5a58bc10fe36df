//! Time lines on a page: a picture, and the longest spans of each lane.

use fathom_run::{Span, Timeline};

use super::{Lane, end, heading};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::html::markup::{Cell, Html, Table as Rows};
use crate::render::text::{duration, plural};

/// Maximum number of points on a page.
const MOST_POINTS: usize = 16;
/// Maximum number of rows of a lane.
const MOST_ROWS: usize = 6;
const WIDTH: f64 = 900.0;
const LEFT: f64 = 84.0;
const ROW: f64 = 17.0;
const GAP: f64 = 7.0;
/// Width of a character in the font of 11 pixels.
const CHARACTER: f64 = 6.4;
/// Colours of palette.css, for the parts of the first lane and for the other lanes.
const COLOURS: [&str; 6] = [
    "--g-guest",
    "--g-switching",
    "--g-server",
    "--g-host_io",
    "--g-device",
    "--g-unattributed",
];

pub(in crate::cells) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, point.time_line.as_ref()?)));
    let count = with.clone().count();
    for (number, (point, told)) in with.take(MOST_POINTS).enumerate() {
        if number == 0 {
            html.heading(prefix, ("time-line", "Time line"), "Where the time goes");
            html.note("From one traced cell of each point.");
        }
        html.element("h3", &[], &words::label(&point.settings));
        let lanes = Lane::all(told);
        picture(html, told, &lanes);
        for (place, lane) in lanes.iter().enumerate() {
            let id = format!("{prefix}time-line-{number}-{place}");
            longest(html, id, lane);
        }
    }
    if count > MOST_POINTS {
        let more = plural((count - MOST_POINTS) as u64, "more point");
        html.note(&format!("And {more}, which JSON has."));
    }
}

fn picture(html: &mut Html, told: &Timeline, lanes: &[Lane]) {
    let rows: Vec<_> = lanes.iter().map(|lane| lane.rows(MOST_ROWS)).collect();
    let count: usize = rows.iter().map(Vec::len).sum();
    let height = count as f64 * ROW + lanes.len() as f64 * GAP + 20.0;
    let view = format!("0 0 {WIDTH} {height}");
    html.open(
        "svg",
        &[("viewBox", &view), ("class", "time-line"), ("role", "img")],
    );
    let scale = (WIDTH - LEFT - 10.0) / end(told).max(f64::MIN_POSITIVE);
    let mut y = 0.0;
    for ((lane, rows), number) in lanes.iter().zip(rows).zip(0..) {
        let middle = format!("{:.1}", y + ROW - 5.0);
        html.element("text", &[("x", "0"), ("y", &middle)], lane.name);
        for row in rows {
            for (place, span) in row.into_iter().enumerate() {
                // The parts of the first lane differ; the spans of another lane are of one kind.
                let colour = if number == 0 { place } else { number };
                draw(html, span, (y, scale), COLOURS[colour % COLOURS.len()]);
            }
            y += ROW;
        }
        y += GAP;
    }
    ticks(html, end(told), scale, y + 10.0);
    html.raw("</svg>\n");
}

fn draw(html: &mut Html, span: &Span, (y, scale): (f64, f64), colour: &str) {
    let (x, width) = (LEFT + span.begin * scale, (span.seconds * scale).max(0.4));
    let [left, top] = [x, y].map(|place| format!("{place:.2}"));
    let (wide, high) = (format!("{width:.2}"), format!("{:.1}", ROW - 3.0));
    let style = format!("fill:var({colour})");
    html.open(
        "rect",
        &[
            ("x", &left),
            ("y", &top),
            ("width", &wide),
            ("height", &high),
            ("style", &style),
        ],
    );
    let words = format!("{}: {}", span.name, duration(span.seconds * 1e9));
    html.element("title", &[], &words);
    html.close("rect");
    if span.name.chars().count() as f64 * CHARACTER + 6.0 < width {
        let (x, y) = (format!("{:.2}", x + 3.0), format!("{:.1}", y + ROW - 6.5));
        let attributes = [("x", x.as_str()), ("y", &y), ("class", "within")];
        html.element("text", &attributes, &span.name);
    }
}

/// Draws about five ticks at round times.
fn ticks(html: &mut Html, end: f64, scale: f64, y: f64) {
    let rough = (end / 6.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|by| by * power);
    let step = steps
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let y = format!("{y:.1}");
    for number in 0..=(end / step).min(100.0) as u32 {
        let at = f64::from(number) * step;
        let x = format!("{:.2}", LEFT + at * scale);
        html.element("text", &[("x", &x), ("y", &y)], &duration(at * 1e9));
    }
}

fn longest(html: &mut Html, id: String, lane: &Lane) {
    let mut rows = Rows::new(id, &[&heading(lane.name), "from", "took"]);
    for span in lane.longest() {
        rows.row(vec![
            Cell::Text(span.name.clone()),
            Cell::Number(duration(span.begin * 1e9)),
            Cell::Number(duration(span.seconds * 1e9)),
        ]);
    }
    rows.show(html);
}
