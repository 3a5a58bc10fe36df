//! Reports of experiments whose measures are in rows.

use std::collections::BTreeMap;

use crate::support::experiment::{HOSTILE, cell, run, write};
use crate::support::judges::{assert_fits, assert_golden, oracle};
use fathom_report::cells::{Table, html, json, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::{Cell, Sheet, SheetRow};

/// Writes a run whose experiment has a sheet of its servers, with `threads` values of another axis.
fn sheet(threads: usize, said: &str) -> Table {
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(8);
    let experiment = run.experiment.as_mut().unwrap();
    let values = experiment.parameters.get_mut("threads").unwrap();
    values.truncate(threads);
    let values = values.clone();
    experiment
        .cells
        .retain(|one| values.contains(&one.settings["threads"]));
    let measured = |heading: &str, measure: &str| SheetRow {
        heading: heading.into(),
        measure: Some(measure.into()),
        said: BTreeMap::new(),
    };
    let words = [("qemu".to_owned(), said.to_owned())];
    experiment.sheet = Some(Sheet {
        parameter: "server".into(),
        rows: vec![
            measured("requests", "iops"),
            measured("CPU of a request", "cpu"),
            measured("what nobody measured", "moon"),
            SheetRow {
                heading: "allocation".into(),
                measure: None,
                said: words.into(),
            },
        ],
    });
    let cells: Vec<Cell> = experiment.cells.iter().map(cell).collect();
    write(dir.path(), &run, cells);
    Table::load(dir.path()).unwrap()
}

#[test]
fn a_sheet_is_as_it_was_found_good() {
    let table = sheet(1, "by weight");
    let text = terminal::report(&table, Style::default());
    assert_fits(&text);
    assert_golden("cells-sheet.txt", &text);
    let page = html::render(&table);
    assert!(page.contains("id=\"sheet-table\"") && page.contains("id=\"points-table\""));
    assert!(oracle(&json(&table)) > 0);
}

#[test]
fn points_that_differ_in_more_have_a_row_each() {
    let table = sheet(2, "by weight");
    let text = terminal::report(&table, Style::default());
    assert!(
        text.contains("Points") && !text.contains("by weight"),
        "{text}"
    );
    assert!(!html::render(&table).contains("sheet-table"));
}

#[test]
fn words_of_strangers_do_no_harm() {
    let table = sheet(1, HOSTILE);
    let text = terminal::report(&table, Style::default());
    assert_fits(&text);
    assert!(!text.contains('\x1b'), "{text}");
    assert!(!html::render(&table).contains("<img"));
}
