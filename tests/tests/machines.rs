//! Tests many machines, side by side or nested, until no more fit (`make test-machines`).
//!
//! The tests use all CPUs for some minutes.

use fathom_run::{Cell, Run};
use fathom_tests::fathom;
use std::path::Path;
use std::process::Command;

fn run(experiment: &str, dir: &Path, more: &[&str]) -> Vec<Cell> {
    let mut command = Command::new(fathom());
    command
        .args(["lab", "run", experiment, "--output"])
        .arg(dir);
    let output = command.args(more).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let plan = Run::load(dir).unwrap().experiment.unwrap();
    plan.load_cells(dir).unwrap()
}

#[test]
fn machines_are_nested_until_the_last_one_that_was_asked_for() {
    let parent = tempfile::tempdir().unwrap();
    let cells = run(
        "nested",
        &parent.path().join("run"),
        &["--levels=3", "--patience=15m"],
    );
    let of = |name: &str| {
        cells[0]
            .measure(name)
            .unwrap_or_else(|| panic!("{name}"))
            .value
    };
    assert_eq!((of("depth"), &cells[0].problems), (3.0, &Vec::new()));
    // Level 1 may be emulated, and then no hypervisor counts the exits of its reads.
    for level in 2..=3 {
        assert!(of(&format!("level{level}.exits")) > 1.0);
    }
    // An exit of level 3 causes several exits of level 2.
    assert!(of("level3.exits") > of("level2.exits"));
    assert!(of("level3.read") > of("level2.read"));
}

#[test]
fn a_level_that_does_not_come_up_is_the_end_and_says_why() {
    let parent = tempfile::tempdir().unwrap();
    let cells = run(
        "nested",
        &parent.path().join("run"),
        &["--levels=2", "--patience=10s"],
    );
    // Within an emulated machine, ten seconds are never enough.
    let is_quick = cells[0].measure("depth").unwrap().value == 2.0;
    let said = &cells[0].problems;
    assert!(is_quick || said[0].starts_with("level 2: "), "{said:?}");
}

#[test]
fn machines_come_up_side_by_side_until_no_more_are_allowed() {
    let parent = tempfile::tempdir().unwrap();
    let steps = [
        "--appliances=8",
        "--step=8",
        "--memory=128M",
        "--max-memory=3G",
    ];
    let more = ["--disk=fathom", "--work=inspect", "--merge=off"];
    let cells = run(
        "parallel",
        &parent.path().join("run"),
        &[&steps[..], &more].concat(),
    );
    let (last, before) = cells.split_last().unwrap();
    assert!(!before.is_empty() && !last.problems.is_empty(), "{last:?}");
    for cell in before {
        assert_eq!(cell.problems, [""; 0]);
        assert!(cell.measure("efficiency").unwrap().value > 0.0);
    }
}
