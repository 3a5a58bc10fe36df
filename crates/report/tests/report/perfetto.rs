//! The trace for Perfetto, read with Perfetto's own published schema.
//!
//! The schema is from the package `perfetto` on PyPI. The first run of these tests installs it
//! in cargo's target directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::sim::Plan;
use crate::support::{Simulated, Watches};
use fathom_report::analysis::Analysis;
use fathom_report::render::perfetto::{Limits, render};
use serde_json::Value;

const PACKAGES: [&str; 2] = ["perfetto==0.59.1", "protobuf==7.36.2"];

fn must_run(command: &mut Command, hint: &str) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; {hint}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}\n{hint}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a Python that has Perfetto's schema.
fn python() -> PathBuf {
    static DIR: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("perfetto-0.59.1");
        let done = dir.join("installed");
        if !done.exists() {
            let venv = ["-m", "venv", "--clear"];
            let hint = "the tests of the Perfetto trace need python3 with venv (python3-venv)";
            must_run(Command::new("python3").args(venv).arg(&dir), hint);
            let hint = "the tests of the Perfetto trace install it from PyPI the first time";
            let mut pip = Command::new(dir.join("bin/pip"));
            must_run(pip.args(["--quiet", "install"]).args(PACKAGES), hint);
            std::fs::write(done, "").unwrap();
        }
        dir
    });
    dir.join("bin/python")
}

/// Returns what Perfetto would show of a trace.
fn read(trace: &[u8]) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.pftrace");
    std::fs::write(&file, trace).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report/perfetto/check.py");
    let text = must_run(Command::new(python()).arg(script).arg(file), "");
    serde_json::from_str(&text).unwrap()
}

fn slices(shown: &Value) -> &Vec<Value> {
    shown["slices"].as_array().unwrap()
}

fn is_request(slice: &Value) -> bool {
    slice["said"].get("number").is_some()
}

fn time(slice: &Value) -> i64 {
    slice["end"].as_i64().unwrap() - slice["start"].as_i64().unwrap()
}

/// Returns the total time of every layer, from the tables.
fn sums(analysis: &Analysis) -> BTreeMap<String, i64> {
    let layers = analysis.exact.iter().flat_map(|exact| &exact.layers);
    layers
        .map(|row| {
            let sum = row.time.mean * row.time.count as f64;
            (row.name.to_owned(), sum.round() as i64)
        })
        .collect()
}

/// Asserts that the trace has the same times as the tables, to the nanosecond: both follow the same
/// requests by the same clocks.
fn assert_as_the_tables(simulated: &Simulated) -> Value {
    let analysis = simulated.analyse();
    let shown = read(&render(simulated.dir.path(), &Limits::default()).unwrap());
    let requests: Vec<&Value> = slices(&shown).iter().filter(|s| is_request(s)).collect();
    let total = &analysis.exact.as_ref().unwrap().total;
    assert_eq!(requests.len() as u64, total.count);
    let all: i64 = requests.iter().map(|request| time(request)).sum();
    assert_eq!(all, (total.mean * total.count as f64).round() as i64);
    for (name, sum) in sums(&analysis) {
        let of_layer = slices(&shown).iter().filter(|slice| slice["name"] == *name);
        let drawn: i64 = of_layer.map(time).sum();
        assert_eq!(drawn, sum, "{name}");
    }
    shown
}

#[test]
fn all_time_of_every_layer_is_in_the_trace() {
    let simulated = Simulated::new(Plan::new(7, 32, 600), Watches::default());
    let shown = assert_as_the_tables(&simulated);
    assert!(shown["instants"][0]["name"] == "all of 600 requests");
}

#[test]
fn clocks_that_causality_relates_are_those_of_the_tables() {
    let watches = Watches {
        told: false,
        ..Watches::default()
    };
    let shown = assert_as_the_tables(&Simulated::new(Plan::new(13, 1, 500), watches));
    assert_eq!(shown["flows"].as_object().unwrap().len(), 500);
}

#[test]
fn of_two_recordings_what_both_saw_is_shown() {
    let mut simulated = Simulated::new(Plan::new(14, 1, 400), Watches::default());
    simulated.run.kind = fathom_run::RunKind::Joined;
    let events = simulated.file("kvm");
    events.drain(..events.len() / 3);
    simulated.run.rounds[0]
        .streams
        .iter_mut()
        .for_each(|info| info.events = 0);
    let begin = simulated.file("kvm")[0].time;
    for name in ["block", "fathom"] {
        simulated.file(name).retain(|event| event.time >= begin);
    }
    simulated.rewrite();
    let shown = assert_as_the_tables(&simulated);
    let requests = slices(&shown).iter().filter(|slice| is_request(slice));
    assert!(requests.count() < 300);
}

#[test]
fn an_arrow_leads_from_each_kick_to_its_interrupt() {
    let simulated = Simulated::new(Plan::new(8, 4, 200), Watches::default());
    let shown = read(&render(simulated.dir.path(), &Limits::default()).unwrap());
    let flows = shown["flows"].as_object().unwrap();
    assert_eq!(flows.len(), 200);
    let mut kicks = 0;
    for steps in flows.values() {
        let steps = steps.as_array().unwrap();
        let (first, last) = (&steps[0], &steps[steps.len() - 1]);
        kicks += usize::from(first[1] == "guest: in the ring before the kick");
        assert!(first[0].as_str().unwrap().starts_with("Guest: requests > "));
        assert_eq!(last[1], "guest: handler to completion");
        let passes = |track: &str| {
            let on = |step: &Value| step[0].as_str().unwrap().starts_with(track);
            steps.iter().any(on)
        };
        assert!(passes("Host: the disk's server > "), "{steps:?}");
        assert!(passes("Host: I/O > "), "{steps:?}");
    }
    assert_eq!(kicks, 200);
}

#[test]
fn vcpus_and_threads_have_tracks_of_their_own() {
    let simulated = Simulated::new(Plan::new(9, 1, 100), Watches::default());
    let shown = read(&render(simulated.dir.path(), &Limits::default()).unwrap());
    let on_vcpu = |slice: &&Value| {
        slice["track"]
            .as_str()
            .unwrap()
            .starts_with("thread 600/601")
    };
    let vcpu: Vec<&Value> = slices(&shown).iter().filter(on_vcpu).collect();
    assert!(vcpu.iter().any(|slice| slice["name"] == "in the guest"));
    assert!(vcpu.iter().any(|slice| slice["name"] == "exit"));
}

#[test]
fn a_big_run_is_cut_and_says_so() {
    let simulated = Simulated::new(Plan::new(10, 8, 400), Watches::default());
    let limits = Limits {
        requests: 50,
        ..Limits::default()
    };
    let cut = render(simulated.dir.path(), &limits).unwrap();
    let shown = read(&cut);
    let starts = |shown: &Value| -> Vec<i64> {
        let requests = slices(shown).iter().filter(|slice| is_request(slice));
        requests.map(|r| r["start"].as_i64().unwrap()).collect()
    };
    let whole = read(&render(simulated.dir.path(), &Limits::default()).unwrap());
    assert_eq!(starts(&shown), starts(&whole)[..50]);
    assert_eq!(shown["instants"][0]["name"], "the first 50 of 400 requests");
    assert_eq!(cut, render(simulated.dir.path(), &limits).unwrap());
}

#[test]
fn damage_still_makes_a_trace() {
    let simulated = Simulated::new(Plan::new(11, 4, 100), Watches::default());
    let file = simulated.dir.path().join("traced-0/kvm.events");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2 - 3]).unwrap();
    let shown = read(&render(simulated.dir.path(), &Limits::default()).unwrap());
    let said = shown["instants"][0]["said"].to_string();
    assert!(said.contains("end in the middle of one"), "{said}");
}

#[test]
fn a_window_shows_the_beginning_of_the_round() {
    let simulated = Simulated::new(Plan::new(12, 4, 300), Watches::default());
    let window = 2_000_000;
    let limits = Limits {
        window_ns: Some(window),
        ..Limits::default()
    };
    let shown = read(&render(simulated.dir.path(), &limits).unwrap());
    let requests = slices(&shown).iter().filter(|slice| is_request(slice));
    let mut starts: Vec<i64> = requests.map(|r| r["start"].as_i64().unwrap()).collect();
    let all: Vec<i64> = simulated
        .truths
        .iter()
        .map(|truth| truth.points[0].1)
        .collect();
    let first = *all.iter().min().unwrap();
    let mut wanted: Vec<i64> = all.into_iter().filter(|at| *at <= first + window).collect();
    starts.sort_unstable();
    wanted.sort_unstable();
    assert!(wanted.len() < 300, "the window must cut something off");
    assert_eq!(starts, wanted);
    let title = shown["instants"][0]["name"].as_str().unwrap();
    assert!(title.contains(&format!(
        "the first {} of 300 requests, none from later",
        wanted.len()
    )));
}
