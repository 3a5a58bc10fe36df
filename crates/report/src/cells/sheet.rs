//! Measures in rows and a parameter's values in columns, each compared with the first value. For
//! experiments whose measures are of many kinds.

use super::cell::clipped;
use super::points::Settings;
use super::table::{Figure, Point, Table};
use super::words::{self, Scale};

/// Maximum number of columns, then of rows.
const MOST_VALUES: usize = 16;
const MOST_ROWS: usize = 100;
/// Maximum number of characters in a heading, then of words in a cell.
const MOST_HEADING: usize = 40;
const MOST_WORDS: usize = 30;
const ROW: &str = "attribute";

pub(super) const EXPLAINED: &str = "In brackets is the ratio to the first column; ~: no difference is \
     shown, ?: not enough rounds for a verdict. Words in quotes are known, not measured. - could not be measured.";

/// A column's heading and the text of each row.
pub(super) type Text = (String, Vec<String>);

/// The rows and columns of a sheet.
pub(super) struct Rows {
    /// The rows' headings, as settings with a single name.
    pub(super) rows: Vec<Settings>,
    pub(super) columns: Vec<Text>,
}

/// Returns the sheet. Returns `None` if the experiment has none, or if its points also differ in
/// other parameters.
pub(super) fn of(table: &Table) -> Option<Rows> {
    let sheet = table.sheet.as_ref()?;
    if table.axes.iter().any(|axis| *axis != sheet.parameter) {
        return None;
    }
    let only = table.parameters.get(&sheet.parameter);
    let points = table.points.iter().take(MOST_VALUES);
    let points = points.map(|point| {
        let value = point.settings.get(&sheet.parameter).or(only)?;
        Some((value, point))
    });
    let points: Vec<(&String, &Point)> = points.collect::<Option<_>>()?;
    let mut columns: Vec<Text> = { points.iter() }
        .map(|(value, _)| ((*value).clone(), Vec::new()))
        .collect();
    let mut rows = Vec::new();
    for row in sheet.rows.iter().take(MOST_ROWS) {
        let figures = points.iter().map(|(_, point)| {
            let name = row.measure.as_ref()?;
            point.measures.get(name)
        });
        let figures: Vec<Option<&Figure>> = figures.collect();
        let unit = { table.measures.iter() }.find(|one| Some(&one.name) == row.measure.as_ref());
        let scale = unit.map(|column| {
            let medians = figures.iter().flatten().map(|figure| figure.median);
            Scale::of(column.unit, medians)
        });
        let heading = clipped(&row.heading, MOST_HEADING);
        let heading = scale
            .as_ref()
            .map_or(heading.clone(), |scale| scale.heading(&heading));
        rows.push(Settings::from([(ROW.into(), heading)]));
        for (((value, _), figure), column) in points.iter().zip(&figures).zip(&mut columns) {
            let said = row.said.get(*value);
            column.1.push(match (figure, &scale, said) {
                (Some(figure), Some(scale), _) => write(figure, scale),
                (_, _, Some(said)) => format!("\"{}\"", clipped(said, MOST_WORDS)),
                _ => "-".into(),
            });
        }
    }
    (!columns.is_empty() && !rows.is_empty()).then_some(Rows { rows, columns })
}

fn write(figure: &Figure, scale: &Scale) -> String {
    let text = scale.write(figure.median);
    match &figure.ratio {
        Some(ratio) => format!("{text} ({})", words::marked(ratio)),
        None => text,
    }
}
