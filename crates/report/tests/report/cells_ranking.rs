//! Rankings of settings in reports of experiments.

use crate::support::experiment::{one_factor, whole};
use crate::support::judges::{assert_fits, assert_golden, oracle};
use fathom_report::cells::{Table, csv, json, terminal};
use fathom_report::render::terminal::Style;
use tempfile::TempDir;

fn ranked_run(rounds: u32) -> (TempDir, Table) {
    let dir = tempfile::tempdir().unwrap();
    one_factor(dir.path(), rounds);
    let table = Table::load(dir.path()).unwrap();
    (dir, table)
}

#[test]
fn a_ranking_is_as_it_was_found_good() {
    let (_dir, table) = ranked_run(8);
    let text = terminal::report(&table, Style::default());
    assert_fits(&text);
    assert_golden("cells-ranked.txt", &text);
}

#[test]
fn settings_are_ranked_by_points_that_differ_in_one() {
    let (_dir, table) = ranked_run(8);
    let measures: Vec<&str> = { table.rankings.iter() }
        .map(|one| one.measure.as_str())
        .collect();
    assert_eq!(measures, ["iops", "latency.p99", "cpu"]);
    let order: Vec<String> = { table.rankings[0].effects.iter() }
        .map(|one| format!("{}={}", one.setting, one.value))
        .collect();
    assert_eq!(order, ["threads=8", "server=fathom", "server=qsd"]);
    assert!(oracle(&json(&table)) > 0);
    let files = csv::render(&table);
    assert_eq!(files[2].name, "ranking.csv");
    let lines: Vec<&str> = files[2].text.split("\r\n").collect();
    assert_eq!(lines.len(), 1 + 3 * 3 + 1);
    assert!(
        lines[1].starts_with("iops,higher,threads,8,1,2.8"),
        "{}",
        lines[1]
    );
    assert!(
        lines[3].ends_with(",no_difference_shown") && lines[1].ends_with(",better"),
        "{lines:?}"
    );
    // A run of all combinations does not vary one factor at a time.
    let dir = tempfile::tempdir().unwrap();
    whole(dir.path(), 5);
    let table = Table::load(dir.path()).unwrap();
    assert_eq!(table.rankings, []);
    assert_eq!(csv::render(&table).len(), 2);
}
