//! The report as a page: one HTML file that needs no network and can be sent to others.
//!
//! This module renders tables, warnings and sentences as HTML, so they need no scripts.
//! `page/*.js` draws the charts from the data in the page, with the library in `vendor/`. The
//! page's Content-Security-Policy forbids it to load or send anything.

mod compare;
mod data;
mod facts;
pub(crate) mod header;
mod layers;
pub(crate) mod markup;
#[cfg(test)]
mod palette;
mod path;
mod threads;
pub(crate) mod words;

use layers::Place;
use markup::{Html, json_in_script};

use super::answer::{self, Suspect};
use super::layout::{Layout, Sheet};
use crate::analysis::Analysis;
use crate::render::comparison::letter;
use crate::render::text::date;

/// A run, with the user's name for it (its directory).
type Named = (String, Analysis);

const STYLES: &[&str] = &[
    include_str!("vendor/uPlot.min.css"),
    include_str!("page/palette.css"),
    include_str!("page/page.css"),
    include_str!("page/charts.css"),
];
const LIBRARY: &str = include_str!("vendor/uPlot.iife.min.js");
const LICENCE: &str = include_str!("vendor/uPlot.LICENSE");
/// The scripts, which share one scope, in order.
const SCRIPTS: &[&str] = &[
    include_str!("page/base.js"),
    include_str!("page/layers.js"),
    include_str!("page/plot.js"),
    include_str!("page/bars.js"),
    include_str!("page/ecdf.js"),
    include_str!("page/heat.js"),
    include_str!("page/waterfall.js"),
    include_str!("page/lines.js"),
    include_str!("page/main.js"),
];

/// Renders the page of one run, or of several: a comparison, then each of the runs.
///
/// The same runs give the same bytes. All text of a run (names, titles, problems) is escaped.
pub fn render(runs: &[(String, Analysis)]) -> String {
    render_and(runs, None)
}

/// Renders the page; the limiter of a single run may be suspected from evidence around it.
pub(crate) fn render_and(runs: &[(String, Analysis)], suspect: Option<&Suspect>) -> String {
    let mut body = Html::default();
    match runs {
        [(_, run)] => one(&mut body, run, suspect),
        several => many(&mut body, several),
    }
    let title = match runs {
        [(_, run)] => run.title.clone(),
        several => format!("{} runs compared", several.len()),
    };
    let mut html = start(&title, &body, &[]);
    html.append(body);
    html.raw(
        "<noscript><p class=\"note\">The charts need scripts; the tables do not.</p></noscript>\n",
    );
    html.raw("</main>\n<footer>Made by fathom. Times are of the host\u{2019}s clock.</footer>\n");
    let mut page = html.finish();
    scripts(&mut page, runs);
    page
}

/// Starts a page: everything before its body, with head and navigation.
pub(crate) fn start(title: &str, body: &Html, styles: &[&'static str]) -> Html {
    let mut html = Html::default();
    head(&mut html, title, styles);
    navigation(&mut html, body);
    html.raw("<main>\n");
    html
}

fn head(html: &mut Html, title: &str, styles: &[&'static str]) {
    html.raw("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.raw("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; ");
    html.raw("style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n");
    html.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    html.raw("<meta name=\"color-scheme\" content=\"light dark\">\n");
    html.element("title", &[], &format!("{title} \u{2013} fathom"));
    html.raw("\n<style>\n");
    for style in STYLES.iter().chain(styles) {
        html.raw(style);
        html.raw("\n");
    }
    html.raw("</style>\n</head>\n<body>\n");
}

fn navigation(html: &mut Html, body: &Html) {
    html.raw("<nav><b>fathom</b>");
    for (id, text) in body.headings() {
        html.element("a", &[("href", &format!("#{id}"))], text);
    }
    html.raw("</nav>\n");
}

fn one(html: &mut Html, run: &Analysis, suspect: Option<&Suspect>) {
    let title = |html: &mut Html| {
        html.element("p", &[("class", "when")], &date(run.created));
        html.element("h1", &[], &run.title);
    };
    sections(html, Place { prefix: "", run: 0 }, (run, suspect), title);
}

/// Shows a run in the common shape of reports.
fn sections(
    html: &mut Html,
    place: Place,
    (run, suspect): (&Analysis, Option<&Suspect>),
    title: impl FnOnce(&mut Html),
) {
    let mut parts = Layout::new(Html::default);
    let answer = answer::of_run(run, suspect, words::duration);
    parts.answer.raw("<header>\n");
    header::answer(&mut parts.answer, &answer);
    title(&mut parts.answer);
    header::show(&mut parts.answer, run);
    parts.answer.raw("</header>\n");
    layers::picture(&mut parts.picture, place, run);
    layers::tables(&mut parts.table, place, run);
    threads::show(&mut parts.table, place, run);
    facts::show(&mut parts.environment, place, run);
    header::problems(&mut parts.environment, &run.problems);
    html.append(parts.finish());
}

fn many(html: &mut Html, runs: &[Named]) {
    html.raw("<header>\n");
    let answer = super::comparison::answer(runs, words::duration);
    html.element("p", &[("class", "verdict")], &answer);
    html.raw("\n");
    html.element("h1", &[], &format!("{} runs compared", runs.len()));
    html.raw("</header>\n");
    compare::show(html, runs);
    for (number, (name, run)) in runs.iter().enumerate() {
        let letter = letter(number);
        let prefix = format!("{letter}-");
        html.raw("<section class=\"run\">\n");
        let place = Place {
            prefix: &prefix,
            run: number,
        };
        let title = |html: &mut Html| {
            html.element("p", &[("class", "when")], &date(run.created));
            html.run_heading(&format!("run-{letter}"), &letter, name);
            html.note(&run.title);
        };
        sections(html, place, (run, None), title);
        html.raw("</section>\n");
    }
}

/// Adds the data, the library with its licence, and the scripts that draw.
fn scripts(page: &mut String, runs: &[Named]) {
    let data = json_in_script(&data::of(runs));
    page.push_str("<script type=\"application/json\" id=\"data\">");
    page.push_str(&data);
    page.push_str("</script>\n<script>\n/*!\n");
    page.push_str(LICENCE);
    page.push_str("*/\n");
    page.push_str(LIBRARY);
    page.push_str("\n</script>\n<script>\n(function () {\n\"use strict\";\n");
    for script in SCRIPTS {
        page.push_str(script);
        page.push('\n');
    }
    page.push_str("})();\n</script>\n</body>\n</html>\n");
}
