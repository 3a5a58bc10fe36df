//! Reports of experiments whose points are side by side.

use crate::support::experiment::{cell, run, write};
use crate::support::judges::{assert_fits, assert_golden, oracle};
use fathom_report::cells::{Point, Table, html, json, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::{Beside, Better, Cell, Measure, Planned, Shown, Unit};
use serde_json::Value;
use tempfile::TempDir;

fn plain(table: &Table) -> String {
    terminal::report(table, Style::default())
}

/// Writes a run whose experiment shows values of a parameter side by side, with this number of
/// vCPUs.
fn side_by_side(parameter: &str, vcpus: usize) -> (TempDir, Table) {
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(8);
    let experiment = run.experiment.as_mut().unwrap();
    let shown = [
        ("iops", "IOPS"),
        ("guest.vcpu*", "vCPU %"),
        ("no-such-measure", "nothing"),
        ("cpu", "us CPU"),
    ];
    experiment.beside = Some(Beside {
        parameter: parameter.into(),
        shown: shown
            .map(|(measure, heading)| Shown {
                measure: measure.into(),
                heading: heading.into(),
            })
            .into(),
    });
    let cells = experiment.cells.iter().map(|planned| {
        let mut cell = cell(planned);
        // The order of the measures is not that of their numbers.
        for vcpu in (0..vcpus).rev() {
            let (name, busy) = (format!("guest.vcpu{vcpu}"), 50.0 - vcpu as f64);
            let measure = Measure::new(name, Unit::Percent, busy, Better::Lower);
            cell.measures.push(measure);
        }
        cell
    });
    let cells: Vec<Cell> = cells.collect();
    write(dir.path(), &run, cells);
    let table = Table::load(dir.path()).unwrap();
    (dir, table)
}

#[test]
fn points_side_by_side_are_as_they_were_found_good() {
    let (_dir, table) = side_by_side("server", 2);
    let text = plain(&table);
    assert_fits(&text);
    assert_golden("cells-beside.txt", &text);
    let page = html::render(&table);
    assert!(page.contains("id=\"beside-2\"") && !page.contains("id=\"beside-3\""));
    assert!(page.contains("B: server=fathom") && page.contains("50.0, 49.0"));
    // The other tables also have all measurements.
    assert!(page.contains("id=\"points-table\"") && page.contains("latency.p99"));
    assert!(oracle(&json(&table)) > 0);
    let json: Value = serde_json::from_str(&json(&table)).unwrap();
    assert_eq!(json["beside"]["shown"][1]["measure"], "guest.vcpu*");
}

/// A server's figure at a depth is compared with the first server's at that depth.
#[test]
fn ratios_are_to_the_first_of_those_side_by_side() {
    let (_dir, table) = side_by_side("server", 1);
    let others = |point: &Point| {
        let mut settings = point.settings.clone();
        settings.remove("server");
        settings
    };
    let (mut bases, mut ratios) = (0, 0);
    for point in &table.points {
        let mut alike = table.points.iter();
        let base = alike.find(|one| others(one) == others(point)).unwrap();
        let (figure, base) = (&point.measures["iops"], &base.measures["iops"]);
        match &figure.ratio {
            None => {
                assert_eq!(figure, base);
                bases += 1;
            }
            Some(ratio) => {
                let close = ratio.median * base.median / figure.median;
                assert!((0.9..1.1).contains(&close), "{close}: {point:?}");
                ratios += 1;
            }
        }
    }
    assert!(bases > 1 && ratios > 1, "{bases} and {ratios}");
    let page = html::render(&table);
    assert!(page.contains("the first row that differs in server alone"));
}

#[test]
fn incomparable_cells_are_shown_alone() {
    // The parameter does not vary.
    let (_dir, table) = side_by_side("scenario", 100);
    let text = plain(&table);
    assert_fits(&text);
    assert!(
        text.contains("scenario=random reads") && !text.contains("B/A"),
        "{text}"
    );
    assert!(text.contains("max 50.0 of 100"), "{text}");
    // The experiment has no such parameter.
    let (_dir, table) = side_by_side("moon", 1);
    let text = plain(&table);
    assert!(text.contains("latency.p99") && !html::render(&table).contains("beside-1"));
}

#[test]
fn rows_and_columns_that_a_pair_has_nothing_of_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(2);
    let experiment = run.experiment.as_mut().unwrap();
    let shown = ["iops", "cpu"].map(|name| Shown {
        measure: name.into(),
        heading: name.into(),
    });
    experiment.beside = Some(Beside {
        parameter: "server".into(),
        shown: shown.into(),
    });
    let is = |cell: &Planned, name: &str, value: &str| cell.settings[name] == value;
    experiment
        .cells
        .retain(|cell| !(is(cell, "server", "qsd") && is(cell, "threads", "1")));
    let cells = experiment.cells.iter().map(|planned| {
        let mut cell = cell(planned);
        // Only for one thread, for which qsd has no point.
        cell.measures
            .retain(|measure| measure.name != "cpu" || is(planned, "threads", "1"));
        cell
    });
    let cells: Vec<Cell> = cells.collect();
    write(dir.path(), &run, cells);
    let table = Table::load(dir.path()).unwrap();
    let text = plain(&table);
    let (_, pairs) = text.split_once("B: server=qsd\n").unwrap();
    let (qsd, fathom) = pairs.split_once("B: server=fathom\n").unwrap();
    let begins = |text: &str| -> Vec<String> {
        let lines = text.lines().take_while(|line| !line.is_empty());
        lines
            .map(|line| line.split_whitespace().next().unwrap().to_owned())
            .collect()
    };
    assert_eq!(begins(qsd), ["threads", "8"]);
    assert!(!qsd.contains("cpu"), "{qsd}");
    assert_eq!(begins(fathom)[..3], ["threads", "1", "8"]);
    assert!(fathom.contains("cpu"), "{fathom}");
    let page = html::render(&table);
    assert!(page.contains("id=\"beside-1\"") && page.contains("id=\"beside-2\""));
}
