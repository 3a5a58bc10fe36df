//! Paths on a terminal.

use super::{Step, between, said};
use crate::cells::table::Table;
use crate::cells::words;
use crate::render::terminal::page::Page;
use crate::render::text::{self, plural};

/// Maximum number of points shown.
const MOST_POINTS: usize = 6;
/// Number of stacks side by side.
const BESIDE: usize = 3;

pub(in crate::cells) fn show(page: &mut Page, table: &Table) {
    let with = { table.points.iter() }.filter_map(|point| Some((point, point.path.as_ref()?)));
    let count = with.clone().count();
    for (point, path) in with.take(MOST_POINTS) {
        match point.settings.is_empty() {
            true => page.heading("The path of a request"),
            false => page.heading(&format!(
                "The path of a request: {}",
                words::label(&point.settings)
            )),
        }
        for steps in Step::all(path).chunks(BESIDE) {
            page.table(&stacks(steps));
            page.gap();
            for step in steps {
                let before = step.before.iter();
                let said: Vec<&str> = before.chain(&step.notes).map(String::as_str).collect();
                page.note(&format!("{}: {}", step.title, said.join("; ")));
            }
            page.gap();
        }
        let (headings, counts) = between(path);
        let mut rows = text::Table::new(1, &headings);
        counts.into_iter().for_each(|row| rows.row(row));
        page.table(&rows);
    }
    if count > MOST_POINTS {
        let more = plural((count - MOST_POINTS) as u64, "more point");
        page.note(&format!("And the paths of {more}, which --html shows."));
    }
}

fn stacks(steps: &[Step]) -> text::Table {
    let headings: Vec<&str> = steps.iter().map(|step| step.title.as_str()).collect();
    let mut rows = text::Table::new(steps.len(), &headings);
    let depth = steps.iter().map(|step| step.stack.frames.len()).max();
    for number in 0..depth.unwrap_or(0) {
        let frame = |step: &Step| {
            step.stack
                .frames
                .get(number)
                .map(|frame| said(frame).to_owned())
        };
        rows.row(steps.iter().map(|step| frame(step).unwrap_or_default()));
    }
    rows
}
