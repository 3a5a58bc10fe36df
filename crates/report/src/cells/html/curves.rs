//! Curves as a picture, with the suspected limiter of each point, and a ring around each knee.

use std::fmt::Write;

use crate::cells::curves::{self, Dot, Line};
use crate::cells::table::{Figure, Table};
use crate::cells::words::{self, Scale};
use crate::render::html::markup::Html;

/// Colours of palette.css; their number is the maximum of lines drawn.
const COLOURS: [&str; 6] = [
    "--g-guest",
    "--g-switching",
    "--g-server",
    "--g-host_io",
    "--g-server_switching",
    "--g-device",
];
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 320.0;
/// Margins around the lines, for figures to the left and below, and limiters to the right.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 30.0;

/// Converts values to places on the picture.
struct Frame {
    /// The values of the axis, without duplicates.
    values: Vec<u64>,
    most: f64,
}

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let axis = curves::axis(&table.axes, &table.points);
    let (Some(main), Some((axis, values))) = (table.main(), axis) else {
        return;
    };
    let lines = curves::lines(&table.points, main, axis);
    let figures = || {
        lines
            .iter()
            .flat_map(|line| &line.dots)
            .map(|dot| dot.figure)
    };
    let ends = |figure: &Figure| figure.interval.map_or(figure.median, |(_, high)| high);
    let most = figures().map(ends).fold(0.0, f64::max);
    if most <= 0.0 || !most.is_finite() {
        return;
    }
    let scale = Scale::of(main.unit, figures().map(|figure| figure.median)).for_pages();
    let heading = format!("{} by {axis}", scale.heading(&main.name));
    html.heading(prefix, ("curves", "Scaling"), &heading);
    html.raw("<div class=\"chart\">\n<div class=\"key\">");
    for (line, colour) in lines.iter().zip(COLOURS) {
        html.raw("<span>");
        html.swatch(colour);
        html.text(&words::label(&line.settings));
        html.raw("</span>");
    }
    html.raw("</div>\n");
    let view = format!("0 0 {WIDTH} {HEIGHT}");
    html.open(
        "svg",
        &[("viewBox", &view), ("class", "curves"), ("role", "img")],
    );
    let frame = Frame { values, most };
    frame.draw(html, &scale);
    for (line, colour) in lines.iter().zip(COLOURS) {
        let mut knees = table.knees.iter();
        let knee = knees.find(|knee| knee.settings == line.settings);
        let at = knee.map(|knee| knee.at.as_str());
        let is_knee = |dot: &Dot| at.is_some() && dot.point.settings.get(axis).map(|x| &**x) == at;
        draw(html, &frame, line, colour, &scale, &is_knee);
    }
    html.raw("</svg>\n");
    words::knees(table).for_each(|line| html.note(&line));
    if lines.len() > COLOURS.len() {
        let (shown, all) = (COLOURS.len(), lines.len());
        html.note(&format!(
            "The first {shown} of {all} lines; the table has all."
        ));
    }
    html.raw("</div>\n");
}

impl Frame {
    /// Returns the x coordinate of a value. The scale is logarithmic if all values are above zero:
    /// 1, 8 and 64 are evenly spaced.
    fn x(&self, value: u64) -> f64 {
        let (first, last) = match self.values.as_slice() {
            [first, .., last] => (*first, *last),
            _ => return LEFT,
        };
        let place = |value: u64| match first {
            0 => value as f64,
            _ => (value as f64).ln(),
        };
        let share = (place(value) - place(first)) / (place(last) - place(first));
        LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value / self.most).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// Draws the grid and its figures behind the curves.
    fn draw(&self, html: &mut Html, scale: &Scale) {
        for share in [0.0, 0.5, 1.0] {
            let value = self.most * share;
            let (y, right) = (self.y(value), WIDTH - RIGHT);
            let path = format!("M{LEFT:.1},{y:.1}H{right:.1}");
            html.element("path", &[("class", "grid"), ("d", &path)], "");
            label(html, "end", (LEFT - 6.0, y + 4.0), &scale.write(value));
        }
        for value in &self.values {
            let words = fathom_units::short_size(*value);
            label(html, "middle", (self.x(*value), HEIGHT - 8.0), &words);
        }
    }
}

fn draw(
    html: &mut Html,
    frame: &Frame,
    line: &Line,
    colour: &str,
    scale: &Scale,
    is_knee: &dyn Fn(&Dot) -> bool,
) {
    let style = format!("--c:var({colour})");
    html.open("g", &[("style", &style)]);
    let mut path = String::new();
    for dot in &line.dots {
        let (x, y) = (frame.x(dot.x), frame.y(dot.figure.median));
        // Writing to a string cannot fail.
        let _ = write!(path, "{x:.1},{y:.1} ");
    }
    html.element("polyline", &[("points", path.trim_end())], "");
    for dot in &line.dots {
        let (x, y) = (frame.x(dot.x), frame.y(dot.figure.median));
        if let Some((low, high)) = dot.figure.interval {
            let path = format!("M{x:.1},{:.1}V{:.1}", frame.y(low), frame.y(high));
            html.element("path", &[("class", "interval"), ("d", &path)], "");
        }
        let (cx, cy) = (format!("{x:.1}"), format!("{y:.1}"));
        if is_knee(dot) {
            let ring = [("class", "knee"), ("cx", &*cx), ("cy", &cy), ("r", "9")];
            html.element("circle", &ring, "");
        }
        html.open("circle", &[("cx", &cx), ("cy", &cy), ("r", "4")]);
        html.element("title", &[], &words_of(dot, scale));
        html.close("circle");
        if let Some(limiter) = &dot.point.limiter {
            label(html, "start", (x + 7.0, y - 6.0), limiter);
        }
    }
    html.close("g");
}

/// Returns the text that is shown when the pointer rests on a dot.
fn words_of(dot: &Dot, scale: &Scale) -> String {
    let mut words = words::label(&dot.point.settings);
    let _ = write!(
        words,
        ": {} {}",
        scale.write(dot.figure.median),
        scale.symbol
    );
    if let Some(verdict) = &dot.point.verdict {
        let _ = write!(words, "\n{verdict}");
    }
    words
}

fn label(html: &mut Html, anchor: &str, (x, y): (f64, f64), words: &str) {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    html.element(
        "text",
        &[("x", &x), ("y", &y), ("text-anchor", anchor)],
        words,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_by_factors_and_from_zero_by_steps() {
        let frame = |values: &[u64]| Frame {
            values: values.to_vec(),
            most: 100.0,
        };
        let (left, right) = (LEFT, WIDTH - RIGHT);
        let factors = frame(&[1, 8, 64]);
        assert!((factors.x(8) - (left + right) / 2.0).abs() < 1e-9);
        let steps = frame(&[0, 10, 40]);
        assert!((steps.x(10) - (left + (right - left) / 4.0)).abs() < 1e-9);
        assert_eq!(frame(&[7]).x(7), left);
        assert_eq!(
            (factors.y(100.0), factors.y(f64::NAN).is_nan()),
            (TOP, true)
        );
    }
}
