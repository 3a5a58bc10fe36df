//! Tests `fathom report` on runs of experiments, as users run it.

mod support;

use std::fs;
use std::path::Path;

use fathom_run::evidence::{Evidence, Load, Throttling};
use fathom_run::{
    Better, Cell, Environment, Experiment, Measure, Planned, Run, RunKind, Unit, VERSION,
};
use support::{refused, run, stdout_of};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn planned(id: &str, round: u32, disk: &str) -> Planned {
    Planned {
        id: id.into(),
        round,
        settings: [("disk".to_owned(), disk.to_owned())].into(),
    }
}

/// Writes a run of two rounds of two disks, in which `done` cells have been run.
fn make_run(dir: &Path, name: &str, done: usize) -> Run {
    let cells = [
        ("1", 1, "qemu"),
        ("2", 1, "fathom"),
        ("3", 2, "fathom"),
        ("4", 2, "qemu"),
    ];
    let experiment = Experiment {
        name: name.into(),
        parameters: [(
            "disk".to_owned(),
            vec!["qemu".to_owned(), "fathom".to_owned()],
        )]
        .into(),
        rounds: 2,
        seed: 7,
        cells: cells
            .map(|(id, round, disk)| planned(id, round, disk))
            .to_vec(),
        ..Experiment::default()
    };
    fs::create_dir_all(dir).unwrap();
    for (i, planned) in experiment.cells.iter().take(done).enumerate() {
        let speed = if planned.settings["disk"] == "fathom" {
            2.0
        } else {
            1.0
        };
        let iops = 1000.0 * speed + i as f64;
        let cell = Cell {
            planned: planned.clone(),
            measures: vec![Measure::new("iops", Unit::PerSecond, iops, Better::Higher)],
            ..Cell::default()
        };
        cell.save(dir).unwrap();
    }
    let run = Run {
        version: VERSION,
        kind: RunKind::Experiment,
        title: format!("{name}: a run for tests"),
        created: 1_790_000_000,
        experiment: Some(experiment),
        scenario: None,
        environment: Environment::default(),
        disks: Vec::new(),
        threads: Vec::new(),
        rounds: Vec::new(),
        problems: Vec::new(),
    };
    run.save(dir).unwrap();
    run
}

/// Writes a run whose requests should have been traced, but none was.
fn make_breakdown(dir: &Path) {
    let run = Run {
        kind: RunKind::Lab,
        title: "a breakdown within".into(),
        experiment: None,
        ..make_run(dir, "x", 0)
    };
    run.save(dir).unwrap();
}

#[test]
fn an_experiments_run_is_a_table_in_every_form() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a.run");
    make_run(&run, "disks", 4);
    let table = stdout_of(&["report", text(&run)]);
    assert!(
        table.contains("disks: a run for tests") && table.contains("2.00x"),
        "{table}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&stdout_of(&["report", text(&run), "--json"])).unwrap();
    assert_eq!(json["points"][1]["measures"]["iops"]["median"], 2001.5);
    let (page, tables, only) = (
        dir.path().join("page.html"),
        dir.path().join("tables"),
        dir.path().join("only.csv"),
    );
    let printed = stdout_of(&[
        "report",
        text(&run),
        "--html",
        text(&page),
        "--csv",
        text(&tables),
    ]);
    assert_eq!(printed, "");
    stdout_of(&["report", text(&run), "--csv", text(&only)]);
    assert!(
        fs::read_to_string(page)
            .unwrap()
            .contains("disks: a run for tests")
    );
    let points = fs::read_to_string(tables.join("points.csv")).unwrap();
    assert_eq!(fs::read_to_string(only).unwrap(), points);
    assert!(points.contains("qemu,2,1001.5,"), "{points}");
    assert!(tables.join("cells.csv").exists());
}

#[test]
fn a_run_that_was_interrupted_is_reported_as_far_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    make_run(dir.path(), "disks", 3);
    let table = stdout_of(&["report", text(dir.path())]);
    let told = "3 of 4 cells are complete (fathom lab run --continue RUN runs";
    assert!(table.contains(told), "{table}");
}

#[test]
fn two_runs_of_an_experiment_are_compared_by_points() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a.run", "b.run"].map(|name| dir.path().join(name));
    make_run(&a, "disks", 4);
    make_run(&b, "disks", 4);
    let table = stdout_of(&["report", text(&a), text(&b)]);
    for words in ["A            a.run", "B            b.run", "B/A", "?1.00x"] {
        assert!(table.contains(words), "no {words} in {table}");
    }
    let json = stdout_of(&["report", text(&a), text(&b), "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        json["points"][0]["measures"]["iops"]["ratio"]["verdict"],
        serde_json::json!({"state": "not_enough_rounds", "more": 3})
    );
    let page = dir.path().join("page.html");
    stdout_of(&["report", text(&a), text(&b), "--html", text(&page)]);
    assert!(
        fs::read_to_string(page)
            .unwrap()
            .contains("id=\"compare-table\"")
    );
}

#[test]
fn what_cannot_be_compared_or_shown_is_told_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a.run", "b.run", "c.run"].map(|name| dir.path().join(name));
    let [a, b, c] = paths.each_ref().map(|path| text(path));
    make_run(&paths[0], "disks", 4);
    make_run(&paths[1], "other\x1b[2J", 4);
    make_breakdown(&paths[2]);
    refused(
        1,
        &["report", a, b],
        &["disks", "other", "cannot be compared"],
    );
    refused(
        1,
        &["report", a, c],
        &["a.run is an experiment's run", "c.run is not"],
    );
    refused(1, &["report", a, a, a], &["two at a time"]);
    refused(
        1,
        &["report", a, a, "--csv", "x"],
        &["--csv is for one run"],
    );
    refused(
        1,
        &["report", a, "--perfetto", "x"],
        &["--perfetto", "table of cells"],
    );
    refused(
        1,
        &["report", a, "--slowest", "3"],
        &["--slowest", "table of cells"],
    );
    refused(
        1,
        &["report", a, a, "--slowest", "3"],
        &["--slowest", "table of cells"],
    );
    assert!(!Path::new("x").exists());
}

#[test]
fn the_breakdown_of_an_only_cell_is_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.run");
    let mut run_of = make_run(&path, "wiki", 2);
    let cell = |id: &str| path.join("cells").join(id);
    make_breakdown(&cell("1"));
    let several = stdout_of(&["report", text(&path)]);
    assert!(
        several.contains("fathom report RUN/cells/1 prints it"),
        "{several}"
    );
    let within = stdout_of(&["report", text(&cell("1"))]);
    assert!(within.contains("a breakdown within"), "{within}");

    run_of.experiment.as_mut().unwrap().cells.truncate(1);
    run_of.save(&path).unwrap();
    assert_eq!(stdout_of(&["report", text(&path)]), within);
    stdout_of(&["report", text(&path), "--slowest", "3", "--json"]);
    let trace = dir.path().join("trace");
    let output = run(&["report", text(&path), "--perfetto", text(&trace)]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!said.contains("table of cells"), "{said}");
    // The report begins with the suspected limiter if the evidence for it exists.
    let page = dir.path().join("page.html");
    let show = || {
        stdout_of(&["report", text(&path), "--html", text(&page)]);
        [
            stdout_of(&["report", text(&path)]),
            fs::read_to_string(&page).unwrap(),
        ]
    };
    assert!(!show().iter().any(|text| text.contains("Limited by")));
    throttled(&run_of.experiment.as_ref().unwrap().cells[0])
        .save(&path)
        .unwrap();
    for text in show() {
        assert!(text.contains("Limited by cpu-cap: CPU cap"), "{text}");
        assert!(text.contains("a breakdown within"), "{text}");
    }
    // A breakdown is shown next to another one, under the name of its run.
    let both = stdout_of(&["report", text(&path), text(&cell("1"))]);
    assert!(
        both.contains("A            a.run: a breakdown within"),
        "{both}"
    );

    // The report reads nothing outside of the run.
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(cell("1"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, cell("1")).unwrap();
    let table = stdout_of(&["report", text(&path)]);
    assert!(!table.contains("a breakdown within"), "{table}");
    assert!(table.contains("symbolic link"), "{table}");
}

/// Returns a cell that is limited by its control group.
fn throttled(planned: &Planned) -> Cell {
    let evidence = Evidence {
        seconds: 1.0,
        load: Load {
            requests: 1000,
            bytes: 4_096_000,
            ..Load::default()
        },
        cgroup: Some(Throttling {
            group: "/small".into(),
            periods: 10,
            throttled: 9,
            seconds: 0.9,
        }),
        ..Evidence::default()
    };
    Cell {
        planned: planned.clone(),
        evidence: Some(evidence),
        ..Cell::default()
    }
}

/// Returns the arguments of a load that takes no time.
fn bench<'a>(file: &'a str, output: &'a str, bs: &'a str) -> Vec<&'a str> {
    let load = [
        "bench",
        file,
        "--rw",
        "read",
        "--buffered",
        "--number-ios=64",
    ];
    let limits = ["--ramp-time=0", "--bs", bs, "--output", output];
    [&load[..], &limits].concat()
}

#[test]
fn loads_are_collected_in_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let (file, output) = (dir.path().join("f"), dir.path().join("r"));
    fs::write(&file, vec![7; 1 << 20]).unwrap();
    for bs in ["4k", "8k", "4k"] {
        stdout_of(&bench(text(&file), text(&output), bs));
    }
    let json: serde_json::Value =
        serde_json::from_str(&stdout_of(&["report", text(&output), "--json"])).unwrap();
    let cells = json["cells"].as_array().unwrap();
    let said: Vec<_> = cells
        .iter()
        .map(|cell| (&cell["settings"]["bs"], &cell["round"]))
        .map(|(bs, round)| (bs.as_str().unwrap().to_owned(), round.as_u64().unwrap()))
        .collect();
    let wanted = [("4k", 1), ("4k", 2), ("8k", 1)].map(|(bs, round)| (bs.to_owned(), round));
    assert_eq!(said, wanted, "{json:#}");
    for cell in cells {
        let measures = &cell["measures"];
        assert!(measures["iops"].as_f64().unwrap() > 0.0, "{cell}");
        // 64 requests are enough for p50, but not for p90.
        assert!(measures["latency.p50"].is_f64() && measures["latency.p90"].is_null());
    }
    assert_eq!(json["points"].as_array().unwrap().len(), 2);

    // The command adds no results to a directory of another kind, and does not measure before it
    // fails.
    let other = dir.path().join("other");
    make_run(&other, "seqread", 1);
    for (output, words) in [(&other, "a run of another command"), (&file, "cannot read")] {
        refused(1, &bench(text(&file), text(output), "4k"), &[words]);
    }
    let foreign = dir.path().join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("mine"), "").unwrap();
    refused(
        1,
        &bench(text(&file), text(&foreign), "4k"),
        &["not a run directory"],
    );
    assert_eq!(fs::read_dir(&foreign).unwrap().count(), 1);
}
