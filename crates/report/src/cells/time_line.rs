//! The time line of a point, from the point's first cell that recorded one.

pub(super) mod html;
pub(super) mod terminal;

use std::path::Path;

use fathom_run::{Planned, Span, Timeline};

use super::cell::{Problems, name};

/// Maximum number of spans that are kept; of more, the longest.
const MOST_SPANS: usize = 5_000;
/// Number of a lane's spans that are named.
const MOST_NAMED: usize = 12;
/// Maximum number of lanes shown.
const MOST_LANES: usize = 8;

/// Reads the first time line that a point's cells have.
pub(super) fn load(run: &Path, planned: &[&Planned], problems: &mut Problems) -> Option<Timeline> {
    for planned in planned {
        match Timeline::load(run, planned) {
            Ok(Some(read)) => return Some(bounded(read)),
            Ok(None) => {}
            Err(_) => {
                let id = name(&planned.id);
                problems.say(format!("cell {id}: its time line cannot be read"));
            }
        }
    }
    None
}

fn bounded(mut read: Timeline) -> Timeline {
    let spans = &mut read.spans;
    spans.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    spans.truncate(MOST_SPANS);
    for span in spans.iter_mut() {
        (span.lane, span.name) = (name(&span.lane), name(&span.name));
    }
    spans.sort_by(|a, b| a.begin.total_cmp(&b.begin));
    read
}

/// Spans of one kind.
struct Lane<'a> {
    name: &'a str,
    /// Spans in order of their start.
    spans: Vec<&'a Span>,
}

impl<'a> Lane<'a> {
    /// Returns the lanes, in the order in which they start.
    fn all(of: &'a Timeline) -> Vec<Lane<'a>> {
        let mut lanes: Vec<Lane> = Vec::new();
        for span in &of.spans {
            match lanes.iter().position(|lane| lane.name == span.lane) {
                Some(known) => lanes[known].spans.push(span),
                None if lanes.len() < MOST_LANES => lanes.push(Lane {
                    name: &span.lane,
                    spans: vec![span],
                }),
                None => {}
            }
        }
        lanes
    }

    /// Returns the longest spans, in order of their start.
    fn longest(&self) -> Vec<&'a Span> {
        let mut spans = self.spans.clone();
        spans.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        spans.truncate(MOST_NAMED);
        spans.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        spans
    }

    /// Returns the spans in rows without overlaps. At most `most` rows are used; spans that do not
    /// fit are left out.
    fn rows(&self, most: usize) -> Vec<Vec<&'a Span>> {
        let mut rows: Vec<Vec<&Span>> = Vec::new();
        for &span in &self.spans {
            let is_free = |row: &Vec<&Span>| row.last().is_none_or(|last| last.end() <= span.begin);
            match rows.iter().position(is_free) {
                Some(free) => rows[free].push(span),
                None if rows.len() < most => rows.push(vec![span]),
                None => {}
            }
        }
        rows
    }
}

/// Returns when the last span ends, in seconds.
fn end(of: &Timeline) -> f64 {
    of.spans.iter().map(Span::end).fold(0.0, f64::max)
}

/// Returns the heading of a lane's table.
fn heading(lane: &str) -> String {
    match lane {
        "machine" => "Parts of the launch".to_owned(),
        "initcalls" => "Longest initcalls of the kernel".to_owned(),
        "programs" => "Longest programs of the user space".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(spans: &[(&str, &str, f64, f64)]) -> Timeline {
        let spans = spans.iter();
        let spans = spans.map(|(lane, name, begin, end)| Span::new(lane, *name, *begin, *end));
        Timeline {
            spans: spans.collect(),
        }
    }

    #[test]
    fn spans_at_the_same_time_are_in_rows_of_their_own() {
        let told = bounded(timeline(&[
            ("programs", "c", 3.0, 4.0),
            ("programs", "outer", 0.0, 3.0),
            ("programs", "b", 1.5, 2.0),
            ("programs", "a", 0.5, 1.5),
        ]));
        let lanes = Lane::all(&told);
        let rows = lanes[0].rows(3);
        let names = |row: &Vec<&Span>| row.iter().map(|one| one.name.clone()).collect::<String>();
        assert_eq!(rows.iter().map(names).collect::<Vec<_>>(), ["outerc", "ab"]);
        assert_eq!(lanes[0].rows(1).len(), 1);
        assert_eq!(end(&told), 4.0);
    }

    #[test]
    fn of_many_spans_the_longest_are_named() {
        let many = (0..100).map(|i| Span::new("l", i.to_string(), f64::from(i), f64::from(2 * i)));
        let told = bounded(Timeline {
            spans: many.collect(),
        });
        let longest = Lane::all(&told)[0].longest();
        assert_eq!(longest.len(), MOST_NAMED);
        assert!(longest.iter().all(|span| span.seconds >= 88.0));
    }
}
