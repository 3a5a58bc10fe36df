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

use super::answer;
use super::compare::Comparison;
use super::effects;
use super::layers;
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
use crate::render::layout::{Layout, Sheet};
use crate::render::text::date;

const STYLES: &[&str] = &[include_str!("page.css")];

/// Renders the page of a run. The same run gives the same bytes. All names and problems of the run
/// are escaped.
pub fn render(table: &Table) -> String {
    let mut body = Html::default();
    run(&mut body, "", table, |html| {
        html.element("p", &[("class", "when")], &date(table.created));
        html.element("h1", &[], &table.title);
    });
    finish(&table.title, body)
}

/// Renders the page of an experiment's only cell, whose requests were followed through all layers,
/// with its suspected limiters.
pub fn breakdown(cell: &[(String, Analysis)], table: &Table) -> String {
    breakdown::render_and(cell, answer::suspect(table).as_ref())
}

/// Renders the page of two runs: their points side by side, then each run.
pub fn compare(comparison: &Comparison) -> String {
    let mut body = Html::default();
    compare::show(&mut body, comparison);
    profile::compare(&mut body, comparison);
    for (letter, (name, table)) in ["A", "B"].into_iter().zip(&comparison.runs) {
        body.raw("<section class=\"run\">\n");
        run(&mut body, &format!("{letter}-"), table, |html| {
            html.element("p", &[("class", "when")], &date(table.created));
            html.run_heading(&format!("run-{letter}"), letter, name);
            html.note(&table.title);
        });
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

/// Shows a run in the common shape of reports. `prefix` makes ids unique on a page with several
/// runs.
fn run(html: &mut Html, prefix: &str, table: &Table, title: impl FnOnce(&mut Html)) {
    let mut parts = Layout::new(Html::default);
    head(&mut parts.answer, table, title);
    let picture = &mut parts.picture;
    bars::show(picture, prefix, table);
    layers::html::show(picture, prefix, table);
    curves::show(picture, prefix, table);
    forest::show(picture, prefix, table);
    show_effects(picture, prefix, table);
    show_limiters(picture, prefix, table);
    profile::show(picture, prefix, table);
    time_line::show(picture, prefix, table);
    path::show(picture, prefix, table);
    let tables = &mut parts.table;
    beside::show(tables, prefix, table);
    sheet::show(tables, prefix, table);
    bonnie::show(tables, prefix, table);
    points::show(tables, prefix, table);
    show_spread(tables, prefix, table);
    lines::show(tables, prefix, table);
    environment(&mut parts.environment, prefix, table);
    html.append(parts.finish());
}

/// Shows the answer, the title, and warnings that make all figures doubtful.
fn head(html: &mut Html, table: &Table, title: impl FnOnce(&mut Html)) {
    let answer = answer::of(table);
    html.raw("<header>\n");
    html.element("p", &[("class", "verdict")], &answer.sentence);
    html.raw("\n");
    let said = answer.advice.map(str::to_owned).into_iter();
    said.chain(answer.more).for_each(|line| html.note(&line));
    title(html);
    if let Some(missing) = words::missing(table) {
        warning(html, "warning", "Not finished.", &missing);
    }
    if let Some(doubt) = facts::doubt(&table.environment) {
        warning(html, "warning", "Mind:", doubt);
    }
    html.raw("</header>\n");
}

fn environment(html: &mut Html, prefix: &str, table: &Table) {
    html.heading(prefix, ("environment", "Environment"), "Environment");
    let id = format!("{prefix}environment-list");
    html.open("dl", &[("class", "facts about"), ("id", &id)]);
    for (name, words) in words::facts(table) {
        html.element("dt", &[], name);
        html.element("dd", &[], &words);
    }
    html.raw("</dl>\n");
    problems(html, &table.problems);
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
    let labels = points::labels(&table.axes, all);
    let column = |(number, heading): (usize, &&str)| {
        let cells = rows.iter().map(|(_, row)| row[number].clone()).collect();
        ((*heading).to_owned(), numbers(cells))
    };
    let columns = spread::HEADINGS.iter().enumerate().map(column).collect();
    let id = format!("{prefix}spread-table");
    points::show_columns(html, &id, labels, vec![columns]);
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
