//! The table of points, and tables that fit the page.

use fathom_run::Better;

use crate::cells::bonnie;
use crate::cells::cell::Column;
use crate::cells::points::Settings;
use crate::cells::table::{Figure, Point, Table};
use crate::cells::verdict::{Ratio, Verdict};
use crate::cells::words::{self, MOST_ROWS, Scale};
use crate::render::html::markup::{self, Cell, Html};
use crate::render::text::plural;

/// Longest value in characters that stays on one line; longer ones would push the figures out of
/// view.
const LONGEST_NAME: usize = 24;
/// Width of a page's tables in pixels, then of a character of a figure, of a character of the
/// smaller notes below it, and of a cell's margins: see page.css.
const PAGE: f64 = 1180.0;
const CHARACTER: f64 = 7.6;
const SMALL: f64 = 6.7;
const MARGINS: f64 = 25.0;

/// A column's heading and its cells.
pub(super) type Columns = Vec<(String, Vec<Cell>)>;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    let shown = &table.points[..table.points.len().min(MOST_ROWS)];
    let mut groups: Vec<Columns> = Vec::new();
    if shown.iter().any(|point| point.done != point.planned) {
        let done = |point: &Point| Cell::Number(format!("{} of {}", point.done, point.planned));
        groups.push(vec![("cells".into(), shown.iter().map(done).collect())]);
    }
    for column in { table.measures.iter() }.filter(|column| !bonnie::has(&column.name)) {
        groups.push(vec![figures(column, shown)]);
        if Some(&column.name) == table.main.as_ref() {
            groups.extend(vs_bare(shown).map(|column| vec![column]));
        }
    }
    if !groups.is_empty() || !bonnie::is_shown(table) {
        html.heading(prefix, ("points", "Points"), "Points");
        for line in words::explained(table) {
            html.note(&line);
        }
        let labels = labels(&table.axes, shown.iter().map(|point| &point.settings));
        show_columns(html, &format!("{prefix}points-table"), labels, groups);
    }
    if shown.len() < table.points.len() {
        let more = plural((table.points.len() - shown.len()) as u64, "more point");
        html.note(&format!("And {more}, which JSON and CSV have."));
    }
    if let Some(line) = words::breakdowns(table) {
        html.note(&line);
    }
}

/// Returns the columns that identify the rows.
pub(super) fn labels<'a>(
    axes: &[String],
    rows: impl Iterator<Item = &'a Settings> + Clone,
) -> Columns {
    if axes.is_empty() {
        let texts = rows.map(|row| Cell::Text(words::label(row)));
        return vec![(String::new(), texts.collect())];
    }
    let column = |name: &String| {
        let value = |row: &Settings| row.get(name).map_or("-".to_owned(), Clone::clone);
        let cell = |value: String| match value.chars().count() {
            0..=LONGEST_NAME => Cell::Name(value),
            _ => Cell::Text(value),
        };
        let texts = rows.clone().map(|row| cell(value(row)));
        (name.clone(), texts.collect())
    };
    axes.iter().map(column).collect()
}

/// Shows rows as a table. A single row becomes a list of two columns. Columns that are too wide for
/// the page become several tables, each with the labels of the rows; a group of columns stays
/// together if it fits.
pub(super) fn show_columns(html: &mut Html, id: &str, labels: Columns, groups: Vec<Columns>) {
    let rows = labels.first().map_or(0, |(_, cells)| cells.len());
    if rows == 1 && groups.iter().flatten().count() > 1 {
        return list(html, id, groups);
    }
    let labelled: f64 = labels.iter().map(width).sum();
    let fits = |group: &Columns| labelled + group.iter().map(width).sum::<f64>() <= PAGE;
    let groups = groups.into_iter().flat_map(|group| match fits(&group) {
        true => vec![group],
        false => group.into_iter().map(|column| vec![column]).collect(),
    });
    let mut parts: Vec<Columns> = vec![Vec::new()];
    let mut used = labelled;
    for group in groups {
        let wide: f64 = group.iter().map(width).sum();
        if used + wide > PAGE && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(Vec::new());
            used = labelled;
        }
        used += wide;
        parts
            .last_mut()
            .expect("there is always a part")
            .extend(group);
    }
    for (number, part) in (1..).zip(parts) {
        let id = match number {
            1 => id.to_owned(),
            number => format!("{id}-{number}"),
        };
        table_of(html, id, labels.iter().cloned().chain(part));
    }
}

fn table_of(html: &mut Html, id: String, columns: impl Iterator<Item = (String, Vec<Cell>)>) {
    let mut table = markup::Table::new(id, &[]);
    let mut cells = Vec::new();
    for (heading, column) in columns {
        table.add_column(heading);
        cells.push(column);
    }
    markup::rows(cells)
        .into_iter()
        .for_each(|row| table.row(row));
    table.show(html);
}

/// Shows the columns of a single row, a line each.
fn list(html: &mut Html, id: &str, groups: Vec<Columns>) {
    let mut table = markup::Table::new(id.to_owned(), &["measure", "value"]);
    for (heading, cells) in groups.into_iter().flatten() {
        table.row(std::iter::once(Cell::Text(heading)).chain(cells).collect());
    }
    table.show(html);
}

/// Returns the width of a column in pixels, as far as it can be known without a browser.
fn width((heading, cells): &(String, Vec<Cell>)) -> f64 {
    let count = |text: &str, of: f64| text.chars().count() as f64 * of;
    let of = |cell: &Cell| match cell {
        Cell::Figure(text, notes) => {
            let notes = notes.iter().map(|(_, note)| count(note, SMALL));
            notes.fold(count(text, CHARACTER), f64::max)
        }
        Cell::Number(text) | Cell::Name(text) => count(text, CHARACTER),
        // Text is wrapped.
        Cell::Text(text) => count(text, CHARACTER).min(LONGEST_NAME as f64 * CHARACTER),
        _ => LONGEST_NAME as f64 * CHARACTER,
    };
    cells.iter().map(of).fold(count(heading, SMALL), f64::max) + MARGINS
}

fn figures(column: &Column, points: &[Point]) -> (String, Vec<Cell>) {
    let of = || points.iter().map(|point| point.measures.get(&column.name));
    let scale = Scale::of(column.unit, of().flatten().map(|figure| figure.median)).for_pages();
    let cells = of().map(|figure| match figure {
        Some(figure) => cell(figure, &scale, column.better),
        None => Cell::Figure("-".into(), Vec::new()),
    });
    (scale.heading(&column.name), cells.collect())
}

/// Returns a figure's cell; with its interval and ratio if the measure can be better or worse.
fn cell(figure: &Figure, scale: &Scale, better: Better) -> Cell {
    let mut notes = Vec::new();
    if better != Better::Neither && figure.interval.is_some() {
        notes.push(("", scale.interval(figure.interval)));
    }
    notes.extend(figure.ratio.iter().map(told));
    Cell::Figure(scale.write(figure.median), notes)
}

/// Returns a ratio in words, and the CSS class of its meaning.
pub(super) fn told(ratio: &Ratio) -> (&'static str, String) {
    let mut text = words::marked(ratio);
    if ratio.interval.is_some() {
        text = format!("{text} ({})", words::ratio_interval(ratio.interval));
    }
    match ratio.verdict {
        Verdict::Better => ("better", text),
        Verdict::Worse => ("worse", text),
        other => ("", format!("{text} {}", words::meaning(other))),
    }
}

fn vs_bare(points: &[Point]) -> Option<(String, Vec<Cell>)> {
    points.iter().find_map(|point| point.vs_bare.as_ref())?;
    let cell = |point: &Point| match &point.vs_bare {
        None => Cell::Figure("-".into(), Vec::new()),
        Some(figure) => {
            let interval = figure.interval.is_some();
            let interval = interval.then(|| ("", words::ratio_interval(figure.interval)));
            Cell::Figure(words::ratio(figure.median), interval.into_iter().collect())
        }
    };
    Some(("vs bare".into(), points.iter().map(cell).collect()))
}
