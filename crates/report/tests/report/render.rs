//! The renderers' output, compared with a reviewed report and read by independent readers of the
//! formats.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::example::{HOSTILE, analysis};
use fathom_report::analysis::Analysis;
use fathom_report::render::terminal::{Style, compare, report};
use fathom_report::render::{csv, json};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    tests.join(name)
}

/// Compares text with a reviewed file. If FATHOM_BLESS is set, overwrites the file: review the
/// diff.
fn assert_golden(name: &str, text: &str) {
    let path = golden(name);
    if std::env::var_os("FATHOM_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    for (number, (is, wanted)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(is, wanted, "{name}:{}", number + 1);
    }
    assert_eq!(text.len(), expected.len(), "{name} is longer or shorter");
}

fn plain(run: &Analysis) -> String {
    report(run, Style::default())
}

fn assert_fits(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
}

#[test]
fn a_report_is_as_it_was_found_good() {
    let text = plain(&analysis());
    assert_fits(&text);
    assert_golden("report.txt", &text);
}

#[test]
fn a_comparison_is_as_it_was_found_good() {
    let mut slower = analysis();
    slower.title = "the same with aio=threads".into();
    slower.environment.stretched = false;
    slower.scenario.as_mut().unwrap().aio = "threads".into();
    let exact = slower.exact.as_mut().unwrap();
    exact.layers.remove(5);
    exact.layers[5].time.mean *= 1.5;
    exact.total.mean = exact.layers.iter().map(|row| row.time.mean).sum();
    exact.truth.lost = vec![("kvm".into(), 3)];
    let mut without = analysis();
    without.exact = None;
    without.wiki = None;
    let runs = [("a.run", analysis()), ("b.run", slower), ("c.run", without)];
    let text = compare(
        &runs.map(|(name, run)| (name.to_owned(), run)),
        Style::default(),
    );
    assert_fits(&text);
    assert_golden("compare.txt", &text);
}

#[test]
fn many_runs_fit_the_page() {
    let runs: Vec<_> = (0..30).map(|i| (format!("run {i}"), analysis())).collect();
    let text = compare(&runs, Style::default());
    assert_fits(&text);
    assert!(text.contains("Z - A") && text.contains("AD - A"));
}

#[test]
fn lost_events_make_the_tails_invalid() {
    let mut run = analysis();
    assert!(!plain(&run).contains("INVALID"));
    run.exact.as_mut().unwrap().truth.lost = vec![("kvm".into(), 12)];
    let text = plain(&run);
    assert!(text.contains("12 events of kvm"), "{text}");
    assert!(
        text.contains("p99, p99.9, max and the slowest requests are INVALID"),
        "{text}"
    );
}

#[test]
fn names_of_a_guest_do_not_steer_the_terminal() {
    let mut run = analysis();
    run.title = HOSTILE.into();
    run.disks[0].name = HOSTILE.repeat(5);
    run.disks[0].identified_by = None;
    run.calls[0].thread.name = HOSTILE.into();
    run.calls[0].calls[0].name = HOSTILE.into();
    run.locks[0].name = Some(HOSTILE.repeat(3));
    run.rounds[0].name = HOSTILE.into();
    run.problems.push(HOSTILE.into());
    let text = plain(&run);
    assert!(!text.contains('\x1b'));
    assert!(text.contains("unidentified"));
    let named = compare(
        &[(HOSTILE.into(), run.clone()), ("b".into(), run)],
        Style::default(),
    );
    assert!(!named.contains('\x1b'));
}

#[test]
fn colour_is_all_that_a_terminal_adds() {
    let coloured = report(&analysis(), Style { colour: true });
    let mut text = coloured.clone();
    for code in ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"] {
        assert!(text.contains(code));
        text = text.replace(code, "");
    }
    assert_eq!(text, plain(&analysis()));
}

#[test]
fn a_run_without_anything_has_a_report() {
    let mut run = analysis();
    run.exact = None;
    run.wiki = None;
    run.scenario = None;
    run.environment = Default::default();
    (run.disks, run.rounds) = Default::default();
    (run.calls, run.locks, run.qemu) = Default::default();
    (run.time_lines, run.picture, run.overhead, run.problems) = Default::default();
    let text = plain(&run);
    assert_fits(&text);
    assert!(text.contains("host         unknown"), "{text}");
    assert!(csv::render(&run).is_empty());
}

/// Reads a file of comma-separated values with Python's reader.
fn read_csv(text: &str) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file.csv");
    std::fs::write(&file, text).unwrap();
    let program = "import csv, json, sys\n\
                   with open(sys.argv[1], newline='') as file:\n \
                   json.dump(list(csv.DictReader(file, strict=True)), sys.stdout)";
    let python = Command::new("python3")
        .args(["-c", program])
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        python.status.success(),
        "{}",
        String::from_utf8_lossy(&python.stderr)
    );
    serde_json::from_slice(&python.stdout).unwrap()
}

fn file(run: &Analysis, name: &str) -> Vec<Value> {
    let files = csv::render(run);
    let found = files.iter().find(|file| file.name == name);
    read_csv(&found.unwrap_or_else(|| panic!("no {name}")).text)
}

/// Asserts that a field of a CSV row equals the JSON report's value.
fn assert_same(field: &Value, value: &Value) {
    let text = field.as_str().unwrap();
    match value {
        Value::Null => assert_eq!(text, ""),
        Value::String(value) => assert_eq!(text, value),
        Value::Number(number) => assert_eq!(text.parse::<f64>().ok(), number.as_f64(), "{text}"),
        other => panic!("{other} against {text}"),
    }
}

#[test]
fn csv_says_what_json_says() {
    let run = analysis();
    let whole: Value = serde_json::from_str(&json::render(&[&run])).unwrap();
    let exact = &whole["exact"];
    let layers = file(&run, "layers.csv");
    let rows = exact["layers"].as_array().unwrap();
    assert_eq!(layers.len(), rows.len() + 1);
    for (line, row) in layers.iter().zip(rows) {
        for name in ["layer", "group", "share", "tail_mean", "negative"] {
            assert_same(&line[name], &row[name]);
        }
        for name in [
            "count",
            "mean",
            "deviation",
            "min",
            "p50",
            "p90",
            "p99",
            "p999",
            "max",
        ] {
            assert_same(&line[name], &row["time"][name]);
        }
    }
    assert_same(&layers[rows.len()]["mean"], &exact["total"]["mean"]);
    let requests = file(&run, "requests.csv");
    let slowest = exact["slowest"].as_array().unwrap();
    assert_eq!(requests.len(), slowest.len());
    for (line, request) in requests.iter().zip(slowest) {
        for name in [
            "number",
            "operation",
            "offset",
            "length",
            "start",
            "total",
            "delivery",
        ] {
            assert_same(&line[name], &request[name]);
        }
        for layer in request["layers"].as_array().unwrap() {
            assert_same(&line[layer[0].as_str().unwrap()], &layer[1]);
        }
    }
    let wiki = file(&run, "wiki.csv");
    assert_same(&wiki[0]["ns"], &whole["wiki"]["cumulative"][0][1]);
    assert_same(
        &wiki[3]["control_or_percent"],
        &whole["wiki"]["delta"][0][2],
    );
    let calls = file(&run, "calls.csv");
    assert_same(&calls[0]["total"], &whole["calls"][0]["calls"][0]["total"]);
    assert_same(
        &calls[1]["mean"],
        &whole["calls"][0]["calls"][0]["post"]["mean"],
    );
    assert_same(
        &file(&run, "qemu.csv")[0]["p50"],
        &whole["qemu"][0]["time"]["p50"],
    );
    assert_same(
        &file(&run, "overhead.csv")[0]["low"],
        &whole["overhead"][0]["low_ns"],
    );
    assert_same(
        &file(&run, "rounds.csv")[2]["mean"],
        &whole["rounds"][2]["benchmark"]["mean_ns"],
    );
}

#[test]
fn hostile_names_come_through_csv_and_json_whole() {
    let mut run = analysis();
    run.locks[0].name = Some(HOSTILE.into());
    assert_eq!(file(&run, "locks.csv")[0]["name"], HOSTILE);
    let whole: Value = serde_json::from_str(&json::render(&[&run, &run])).unwrap();
    assert_eq!(whole[1]["locks"][0]["name"], HOSTILE);
}
