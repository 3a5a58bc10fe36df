//! Experiments as a page: one HTML file that needs no network. The page's only scripts are those
//! within the frames of flame graphs.

mod bars;
mod beside;
mod bonnie;
mod compare;
mod curves;
mod forest;
mod lines;
mod points;
mod sheet;

use super::compare::Comparison;
use super::effects;
use super::path::html as path;
use super::profile::html as profile;
use super::spread;
use super::table::Table;
use super::time_line::html as time_line;
use super::words;
use crate::analysis::Analysis;
use crate::render::facts;
use crate::render::html::header::{problems, warning};
use crate::render::html::markup::{Html, numbers};
use crate::render::html::{self as breakdown, start};
use crate::render::text::date;

const STYLES: &[&str] = &[include_str!("page.css")];

/// Renders the page of a run. The same run gives the same bytes. All names and problems of the run
/// are escaped.
pub fn render(table: &Table) -> String {
    let mut body = Html::default();
    body.raw("<header>\n");
    body.element("p", &[("class", "when")], &date(table.created));
    body.element("h1", &[], &table.title);
    head(&mut body, "", table);
    body.raw("</header>\n");
    sections(&mut body, "", table);
    finish(&table.title, body)
}

/// Renders the page of an experiment's only cell, whose requests were followed through all layers,
/// with its suspected limiters.
pub fn breakdown(cell: &[(String, Analysis)], table: &Table) -> String {
    breakdown::render_and(cell, |html| show_limiters(html, "", table))
}

/// Renders the page of two runs: their points side by side, then each run.
pub fn compare(comparison: &Comparison) -> String {
    let mut body = Html::default();
    compare::show(&mut body, comparison);
    profile::compare(&mut body, comparison);
    for (letter, (name, table)) in ["A", "B"].into_iter().zip(&comparison.runs) {
        body.raw("<section class=\"run\">\n<header>\n");
        body.element("p", &[("class", "when")], &date(table.created));
        body.run_heading(&format!("run-{letter}"), letter, name);
        body.note(&table.title);
        let prefix = format!("{letter}-");
        head(&mut body, &prefix, table);
        body.raw("</header>\n");
        sections(&mut body, &prefix, table);
        body.raw("</section>\n");
    }
    finish("Runs of an experiment compared", body)
}

fn finish(title: &str, body: Html) -> String {
    let mut html = start(title, &body, STYLES);
    html.append(body);
    html.raw("</main>\n<footer>Made by fathom.</footer>\n</body>\n</html>\n");
    html.finish()
}

/// Shows warnings, then the facts of the run.
fn head(html: &mut Html, prefix: &str, table: &Table) {
    if let Some(missing) = words::missing(table) {
        warning(html, "warning", "Not finished.", &missing);
    }
    if let Some(doubt) = facts::doubt(&table.environment) {
        warning(html, "warning", "Mind:", doubt);
    }
    problems(html, &table.problems);
    let id = format!("{prefix}environment-list");
    html.open("dl", &[("class", "facts about"), ("id", &id)]);
    for (name, words) in words::facts(table) {
        html.element("dt", &[], name);
        html.element("dd", &[], &words);
    }
    html.raw("</dl>\n");
}

/// Shows the sections of a run. `prefix` makes ids unique on a page with several runs.
fn sections(html: &mut Html, prefix: &str, table: &Table) {
    beside::show(html, prefix, table);
    sheet::show(html, prefix, table);
    bonnie::show(html, prefix, table);
    points::show(html, prefix, table);
    show_limiters(html, prefix, table);
    show_effects(html, prefix, table);
    forest::show(html, prefix, table);
    bars::show(html, prefix, table);
    curves::show(html, prefix, table);
    show_spread(html, prefix, table);
    profile::show(html, prefix, table);
    time_line::show(html, prefix, table);
    path::show(html, prefix, table);
    lines::show(html, prefix, table);
}

/// Shows the suspected limiters as sentences; as the last column of a wide table, they would be
/// out of view.
fn show_limiters(html: &mut Html, prefix: &str, table: &Table) {
    let judged: Vec<_> = words::judged(table).collect();
    if judged.is_empty() {
        return;
    }
    html.heading(prefix, ("limiters", "Limiters"), "Suspected limiters");
    html.open("ul", &[("id", &format!("{prefix}limiters-list"))]);
    for line in judged {
        html.element("li", &[], &line);
        html.raw("\n");
    }
    html.raw("</ul>\n");
}

fn show_spread(html: &mut Html, prefix: &str, table: &Table) {
    let Some((main, rows)) = spread::of(table) else {
        return;
    };
    html.heading(
        prefix,
        ("spread", "Spread"),
        &format!("{} over rounds", main.name),
    );
    let all = rows.iter().map(|(place, _)| &table.points[*place].settings);
    let mut columns = points::labels(&table.axes, all);
    for (number, heading) in spread::HEADINGS.iter().enumerate() {
        let cells = rows.iter().map(|(_, row)| row[number].clone()).collect();
        columns.push(((*heading).to_owned(), numbers(cells)));
    }
    points::show_columns(html, format!("{prefix}spread-table"), columns);
    html.note(spread::EXPLAINED);
}

fn show_effects(html: &mut Html, prefix: &str, table: &Table) {
    let sentences = effects::sentences(table);
    let Some((of, sentences)) = sentences.split_first() else {
        return;
    };
    html.heading(prefix, ("effects", "Effects"), "Effects");
    html.note(of);
    html.open("ul", &[("id", &format!("{prefix}effects-list"))]);
    for sentence in sentences {
        html.element("li", &[], sentence);
        html.raw("\n");
    }
    html.raw("</ul>\n");
}
