//! Side by side: one row for points that differ only in one parameter, with a group of columns per
//! value. Each value is compared with the first. The experiment names the parameter and the
//! measures shown.

use std::collections::{BTreeMap, BTreeSet};

use fathom_run::{Better, Shown};

use super::cell::{Column, clipped};
use super::points::Settings;
use super::table::{Figure, Point, Table};
use super::words::{self, MOST_ROWS, Scale};

/// Maximum number of values of the parameter.
const MOST_VALUES: usize = 16;
/// Maximum number of columns per value.
const MOST_COLUMNS: usize = 16;
/// Maximum number of characters in a heading.
const MOST_HEADING: usize = 20;
/// Maximum number of figures in a table cell; of more, only the greatest is shown.
const MOST_FIGURES: usize = 4;
/// The suffix of a measure's name that selects all measures with the rest as their prefix.
const ALL: char = '*';

/// A column's heading and the text of each row.
pub(super) type Text = (String, Vec<String>);

/// A table's points by the parameter that the experiment names.
pub(super) struct Sides<'a> {
    table: &'a Table,
    parameter: &'a str,
    values: Vec<&'a str>,
    rows: Vec<Settings>,
    points: BTreeMap<(usize, &'a str), &'a Point>,
    columns: Vec<Shows<'a>>,
}

/// A column that is shown for each value.
struct Shows<'a> {
    heading: String,
    measures: Vec<&'a Column>,
    scale: Scale,
}

/// The columns and rows that a comparison of two values shows.
struct Part<'a> {
    columns: Vec<&'a Shows<'a>>,
    rows: &'a [usize],
}

/// A comparison of one value with the first.
pub(super) struct Against<'a> {
    /// Names of A and B.
    pub(super) names: Vec<String>,
    /// The common settings of each row's points, for the rows that have both values.
    pub(super) rows: Vec<&'a Settings>,
    /// Columns of A, of B, and of their ratios; only those of A if there is no other value.
    pub(super) columns: Vec<Vec<Text>>,
}

impl<'a> Sides<'a> {
    /// Returns `None` if the experiment names no parameter, or if none of its measures was
    /// measured.
    pub(super) fn of(table: &'a Table) -> Option<Sides<'a>> {
        let beside = table.beside.as_ref()?;
        let parameter = beside.parameter.as_str();
        let only = table.parameters.get(parameter);
        let (mut values, mut rows) = (Vec::new(), Vec::new());
        let (mut places, mut points) = (BTreeMap::new(), BTreeMap::new());
        for point in &table.points {
            let value = point.settings.get(parameter).or(only)?.as_str();
            if !values.contains(&value) && values.len() < MOST_VALUES {
                values.push(value);
            }
            let mut row = point.settings.clone();
            row.remove(parameter);
            let place = *places.entry(row.clone()).or_insert(rows.len());
            if place == rows.len() {
                rows.push(row);
            }
            points.entry((place, value)).or_insert(point);
        }
        rows.truncate(MOST_ROWS);
        let columns = beside.shown.iter().take(MOST_COLUMNS);
        let columns = columns.filter_map(|shown| Shows::of(shown, table));
        let sides = Sides {
            columns: columns.collect(),
            table,
            parameter,
            values,
            rows,
            points,
        };
        let is_there = !sides.columns.is_empty() && !sides.values.is_empty();
        is_there.then_some(sides)
    }

    /// Returns a comparison of each other value with the first; a single value stands alone.
    pub(super) fn pairs(&self) -> Vec<Against<'_>> {
        let Some((first, others)) = self.values.split_first() else {
            return Vec::new();
        };
        let name = |letter: &str, value: &str| format!("{letter}: {}={value}", self.parameter);
        if others.is_empty() {
            let names = vec![format!("{}={first}", self.parameter)];
            let columns = |part: &Part| vec![self.figures("", first, part)];
            return vec![self.against(names, [first; 2], columns)];
        }
        let pair = |other: &&str| {
            let names = vec![name("A", first), name("B", other)];
            self.against(names, [first, other], |part| {
                vec![
                    self.figures("A", first, part),
                    self.figures("B", other, part),
                    self.ratios(other, part),
                ]
            })
        };
        others.iter().map(pair).collect()
    }

    /// Builds a comparison from the rows that have both values and the columns that have a figure.
    fn against(
        &self,
        names: Vec<String>,
        [first, other]: [&str; 2],
        columns: impl Fn(&Part) -> Vec<Vec<Text>>,
    ) -> Against<'_> {
        let has = |row: usize, value| self.points.contains_key(&(row, value));
        let rows = (0..self.rows.len()).filter(|&row| has(row, first) && has(row, other));
        let rows: Vec<usize> = rows.collect();
        let is_told = |shows: &&Shows| {
            let is_in = |row: usize, value| !self.told(row, value, shows).is_empty();
            rows.iter()
                .any(|&row| is_in(row, first) || is_in(row, other))
        };
        let part = Part {
            columns: self.columns.iter().filter(is_told).collect(),
            rows: &rows,
        };
        Against {
            columns: columns(&part),
            rows: rows.iter().map(|&row| &self.rows[row]).collect(),
            names,
        }
    }

    /// Returns notes that explain the figures.
    pub(super) fn explained(&self) -> Vec<String> {
        let figures = self
            .points
            .values()
            .flat_map(|point| point.measures.values());
        let most = figures.map(|figure| figure.rounds.len()).max();
        let mut lines = vec![words::rounds_explained(most.unwrap_or(0))];
        if self.values.len() > 1 {
            let base = "B/A is the ratio to the first, of each round's own pair";
            lines.push(words::verdicts_explained(base));
            lines.extend(words::more_rounds(self.table));
        }
        lines.extend(words::short_loads(self.table));
        lines
    }

    fn figure(&self, row: usize, value: &str, column: &Column) -> Option<&'a Figure> {
        let point = self.points.get(&(row, value))?;
        point.measures.get(&column.name)
    }

    fn told(&self, row: usize, value: &str, shows: &Shows) -> Vec<&'a Figure> {
        let measures = shows.measures.iter();
        let figures = measures.filter_map(|column| self.figure(row, value, column));
        figures.collect()
    }

    fn figures(&self, letter: &str, value: &str, part: &Part) -> Vec<Text> {
        let columns = part.columns.iter().enumerate();
        let text = |(place, shows): (usize, &&Shows)| {
            let heading = match place {
                0 => format!("{letter} {}", shows.heading)
                    .trim_start()
                    .to_owned(),
                _ => shows.heading.clone(),
            };
            let row = |&row| shows.write(&self.told(row, value, shows));
            (heading, part.rows.iter().map(row).collect())
        };
        columns.map(text).collect()
    }

    /// Returns the ratio columns of measures with a single figure that can be better or worse.
    fn ratios(&self, other: &str, part: &Part) -> Vec<Text> {
        let is_one = |shows: &&&Shows| shows.judged().is_some();
        let columns = part.columns.iter().filter(is_one).enumerate();
        let text = |(place, shows): (usize, &&Shows)| {
            let ratio = |row| -> Option<String> {
                // The first value of a row is the base of the table's ratios.
                let figure = self.figure(row, other, shows.judged()?)?;
                Some(words::marked(figure.ratio.as_ref()?))
            };
            let texts = part
                .rows
                .iter()
                .map(|&row| ratio(row).unwrap_or("-".into()));
            let heading = match place {
                0 => format!("B/A {}", shows.heading),
                _ => shows.heading.clone(),
            };
            (heading, texts.collect())
        };
        columns.map(text).collect()
    }
}

impl<'a> Shows<'a> {
    fn of(shown: &Shown, table: &'a Table) -> Option<Shows<'a>> {
        let measures: Vec<&Column> = match shown.measure.strip_suffix(ALL) {
            None => {
                let is_it = |column: &&Column| column.name == shown.measure;
                table.measures.iter().filter(is_it).collect()
            }
            Some(begin) => numbered(begin, &table.measures),
        };
        let names: BTreeSet<&String> = measures.iter().map(|column| &column.name).collect();
        let medians = table.points.iter().flat_map(|point| {
            let figures = point.measures.iter();
            let figures = figures.filter(|(name, _)| names.contains(name));
            figures.map(|(_, figure)| figure.median)
        });
        let unit = measures.first()?.unit;
        Some(Shows {
            heading: clipped(&shown.heading, MOST_HEADING),
            scale: Scale::plain(unit, medians),
            measures,
        })
    }

    fn write(&self, figures: &[&Figure]) -> String {
        let texts = figures.iter().map(|figure| self.scale.write(figure.median));
        match figures.len() {
            0 => "-".into(),
            1..=MOST_FIGURES => texts.collect::<Vec<_>>().join(", "),
            count => {
                let most = figures.iter().map(|figure| figure.median);
                let most = most.fold(f64::MIN, f64::max);
                format!("max {} of {count}", self.scale.write(most))
            }
        }
    }

    fn judged(&self) -> Option<&'a Column> {
        match self.measures.as_slice() {
            [column] if column.better != Better::Neither => Some(column),
            _ => None,
        }
    }
}

/// Returns the columns whose names are `begin` and a number, in order of the number.
fn numbered<'a>(begin: &str, columns: &'a [Column]) -> Vec<&'a Column> {
    let number = |column: &'a Column| {
        let rest = column.name.strip_prefix(begin)?;
        Some((rest.parse::<u32>().ok()?, column))
    };
    let mut found: Vec<(u32, &Column)> = columns.iter().filter_map(number).collect();
    found.sort_by_key(|(number, _)| *number);
    found.into_iter().map(|(_, column)| column).collect()
}
