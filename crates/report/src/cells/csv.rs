//! Experiments as comma-separated values (RFC 4180): `points.csv`, `cells.csv` and, if the run
//! ranks settings, `ranking.csv`. Values are in the units of run.json's measures.

use fathom_run::Better;

use super::cell::Row;
use super::table::{Figure, Point, Table};
use crate::render::csv::{CsvFile, Sheet};

/// Renders a run as files; the points come first.
pub fn render(table: &Table) -> Vec<CsvFile> {
    let files = [("points.csv", points(table)), ("cells.csv", cells(table))];
    let ranking = (!table.rankings.is_empty()).then(|| ("ranking.csv", ranking(table)));
    let files = files.into_iter().chain(ranking);
    files
        .map(|(name, sheet)| CsvFile {
            name,
            text: sheet.text,
        })
        .collect()
}

/// A row for each point: its settings and, for each measure, the median over rounds, its interval,
/// and its ratio to the base with the verdict.
fn points(table: &Table) -> Sheet {
    let mut head: Vec<String> = parameters(table).cloned().collect();
    head.push("cells".into());
    for column in &table.measures {
        let name = &column.name;
        head.extend(["", ".low", ".high"].map(|end| format!("{name}{end}")));
        let ratio = ["", ".low", ".high", ".verdict"];
        head.extend(ratio.map(|end| format!("{name}.ratio{end}")));
    }
    head.extend(["bare", "vs_bare", "verdict"].map(str::to_owned));
    let mut sheet = Sheet::with(head);
    for point in &table.points {
        sheet.row(point_row(table, point));
    }
    sheet
}

fn point_row(table: &Table, point: &Point) -> Vec<String> {
    let mut fields = values(table, |name| {
        point
            .settings
            .get(name)
            .or_else(|| table.parameters.get(name))
    });
    fields.push(point.done.to_string());
    for column in &table.measures {
        let figure = point.measures.get(&column.name);
        let ratio = figure.and_then(|figure| figure.ratio.as_ref());
        let figures = [
            figure.map(|figure| (figure.median, figure.interval)),
            ratio.map(|ratio| (ratio.median, ratio.interval)),
        ];
        for figure in figures {
            let interval = figure.and_then(|(_, interval)| interval).unzip();
            fields.push(number(figure.map(|(median, _)| median)));
            fields.extend([interval.0, interval.1].map(number));
        }
        let verdict = ratio.map_or("", |ratio| ratio.verdict.name());
        fields.push(verdict.to_owned());
    }
    let median = |figure: &Option<Figure>| number(figure.as_ref().map(|figure| figure.median));
    fields.extend([median(&point.bare), median(&point.vs_bare)]);
    fields.push(point.verdict.clone().unwrap_or_default());
    fields
}

/// A row for each cell that was run: its settings and its measures.
fn cells(table: &Table) -> Sheet {
    let mut head = vec!["id".to_owned(), "round".into()];
    head.extend(parameters(table).cloned());
    head.push("seconds".into());
    head.extend(table.measures.iter().map(|column| column.name.clone()));
    let bare = ["requests_per_second", "bytes_per_second", "mean_ns"];
    head.extend(bare.map(|name| format!("bare.{name}")));
    let mut sheet = Sheet::with(head);
    for cell in &table.cells {
        sheet.row(cell_row(table, cell));
    }
    sheet
}

fn cell_row(table: &Table, cell: &Row) -> Vec<String> {
    let mut fields = vec![cell.id.clone(), cell.round.to_string()];
    fields.extend(values(table, |name| cell.settings.get(name)));
    fields.push(cell.seconds.to_string());
    let measures = table.measures.iter();
    fields.extend(measures.map(|column| number(cell.measures.get(&column.name).copied())));
    let bare = cell.bare.as_ref();
    let bare = bare.map(|bare| {
        [
            bare.requests_per_second,
            bare.bytes_per_second,
            bare.mean_ns,
        ]
    });
    match bare {
        Some(figures) => fields.extend(figures.map(|figure| figure.to_string())),
        None => fields.extend([const { String::new() }; 3]),
    }
    fields
}

/// A row for each effect of a setting on a measure, in the order of the rankings.
fn ranking(table: &Table) -> Sheet {
    let head = [
        "measure",
        "better",
        "setting",
        "value",
        "base",
        "ratio",
        "ratio.low",
        "ratio.high",
        "verdict",
    ];
    let mut sheet = Sheet::with(head.map(str::to_owned));
    for ranking in &table.rankings {
        for effect in &ranking.effects {
            let ratio = &effect.ratio;
            let better = match ranking.better {
                Better::Higher => "higher",
                _ => "lower",
            };
            let texts = [
                &ranking.measure,
                better,
                &effect.setting,
                &effect.value,
                &effect.base,
            ];
            let mut fields: Vec<String> = texts.map(str::to_owned).into();
            let (low, high) = ratio.interval.unzip();
            fields.extend([Some(ratio.median), low, high].map(number));
            fields.push(ratio.verdict.name().to_owned());
            sheet.row(fields);
        }
    }
    sheet
}

/// Returns the names of the axes, then of the parameters that do not vary.
fn parameters(table: &Table) -> impl Iterator<Item = &String> {
    table.axes.iter().chain(table.parameters.keys())
}

fn values<'a>(table: &Table, of: impl Fn(&str) -> Option<&'a String>) -> Vec<String> {
    let values = parameters(table).map(|name| of(name).cloned().unwrap_or_default());
    values.collect()
}

fn number(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}
