//! The main measure of every point as a bar with its interval, and the bare device's bar below it.

use crate::cells::statistics::Interval;
use crate::cells::table::{Figure, Point, Table};
use crate::cells::words::{self, Scale};
use crate::render::html::markup::Html;

/// Maximum number of bars that remain readable.
const MOST_BARS: usize = 200;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let Some(main) = table.main() else { return };
    let of = |point: &Point| point.measures.get(&main.name).cloned();
    // Points of other tests have neither figure.
    let all = table.points.iter().map(|point| (point, of(point)));
    let mut shown: Vec<(&Point, Option<Figure>)> = all
        .filter(|(point, figure)| figure.is_some() || point.bare.is_some())
        .collect();
    let all = shown.len();
    shown.truncate(MOST_BARS);
    let figures = || {
        shown
            .iter()
            .flat_map(|(point, figure)| [figure, &point.bare])
            .flatten()
    };
    let ends = |figure: &Figure| figure.interval.map_or(figure.median, |(_, high)| high);
    let most = figures().map(ends).fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    let scale = Scale::of(main.unit, figures().map(|figure| figure.median)).for_pages();
    html.heading(prefix, ("bars", "Bars"), &scale.heading(&main.name));
    html.raw("<div class=\"chart\">\n");
    key(
        html,
        &main.name,
        figures().any(|figure| figure.interval.is_some()),
        &shown,
    );
    html.open(
        "div",
        &[("class", "bars"), ("id", &format!("{prefix}main-bars"))],
    );
    for (point, figure) in &shown {
        html.element("div", &[("class", "label")], &words::label(&point.settings));
        html.raw("<div class=\"meter\">");
        if let Some(figure) = figure {
            bar(html, "", figure.median / most);
            if let Some(interval) = figure.interval {
                line(html, interval, most);
            }
        }
        if let Some(bare) = &point.bare {
            bar(html, "bare", bare.median / most);
        }
        html.raw("</div>");
        sum(html, point, figure.as_ref(), &scale);
    }
    html.raw("</div>\n");
    if shown.len() < all {
        let words = format!("The first {MOST_BARS} of {all} points.");
        html.note(&words);
    }
    html.raw("</div>\n");
}

fn key(html: &mut Html, name: &str, intervals: bool, shown: &[(&Point, Option<Figure>)]) {
    html.raw("<div class=\"key\"><span>");
    html.swatch("--accent");
    html.text(name);
    html.text(if intervals { ", with its interval" } else { "" });
    html.raw("</span>");
    if shown.iter().any(|(point, _)| point.bare.is_some()) {
        html.raw("<span>");
        html.swatch("--plain");
        html.text("the same work on the bare device");
        html.raw("</span>");
    }
    html.raw("</div>\n");
}

/// Draws a bar; `share` is its length relative to the greatest.
fn bar(html: &mut Html, class: &'static str, share: f64) {
    let style = format!("--at:{:.4}", share.clamp(0.0, 1.0));
    html.element("i", &[("class", class), ("style", &style)], "");
}

fn line(html: &mut Html, (low, high): Interval, most: f64) {
    let share = |value: f64| (value / most).clamp(0.0, 1.0);
    let style = format!("--from:{:.4};--to:{:.4}", share(low), share(high));
    html.element("i", &[("class", "interval"), ("style", &style)], "");
}

fn sum(html: &mut Html, point: &Point, figure: Option<&Figure>, scale: &Scale) {
    html.raw("<div class=\"sum\">");
    match figure {
        Some(figure) => {
            html.text(&scale.write(figure.median));
            html.element("small", &[], &scale.interval(figure.interval));
        }
        None => html.text("-"),
    }
    if let Some(vs_bare) = &point.vs_bare {
        let text = format!("{} of bare", words::ratio(vs_bare.median));
        html.element("small", &[], &text);
    }
    html.raw("</div>\n");
}
