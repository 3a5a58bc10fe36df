//! The table of points.

use fathom_run::Better;

use crate::cells::bonnie;
use crate::cells::cell::Column;
use crate::cells::points::Settings;
use crate::cells::statistics::Ratio;
use crate::cells::table::{Figure, Point, Table};
use crate::cells::words::{self, MOST_ROWS, Scale};
use crate::render::html::markup::{self, Cell, Html};
use crate::render::text::plural;

/// Longest value in characters that stays on one line; longer ones would push the figures out of
/// view.
const LONGEST_NAME: usize = 24;

pub(super) fn show(html: &mut Html, prefix: &str, table: &Table) {
    html.heading(prefix, ("points", "Points"), "Points");
    for line in words::explained(table) {
        html.note(&line);
    }
    let shown = &table.points[..table.points.len().min(MOST_ROWS)];
    let mut columns: Vec<(String, Vec<Cell>)> =
        labels(&table.axes, shown.iter().map(|point| &point.settings));
    if shown.iter().any(|point| point.done != point.planned) {
        let done = |point: &Point| Cell::Number(format!("{} of {}", point.done, point.planned));
        columns.push(("cells".into(), shown.iter().map(done).collect()));
    }
    for column in { table.measures.iter() }.filter(|column| !bonnie::has(&column.name)) {
        columns.push(figures(column, shown));
        if Some(&column.name) == table.main.as_ref() {
            columns.extend(vs_bare(shown));
        }
    }
    show_columns(html, format!("{prefix}points-table"), columns);
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
) -> Vec<(String, Vec<Cell>)> {
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

pub(super) fn show_columns(html: &mut Html, id: String, columns: Vec<(String, Vec<Cell>)>) {
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
    notes.extend(figure.ratio.iter().map(|ratio| told(ratio, better)));
    Cell::Figure(scale.write(figure.median), notes)
}

/// Returns a ratio in words, and the CSS class of its meaning.
pub(super) fn told(ratio: &Ratio, better: Better) -> (&'static str, String) {
    let mut text = words::marked(ratio);
    if ratio.interval.is_some() {
        text = format!("{text} ({})", words::ratio_interval(ratio.interval));
    }
    let class = match words::meaning(ratio, better) {
        "within noise" => {
            text.push_str(" within noise");
            ""
        }
        other => other,
    };
    (class, text)
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
