//! Checks that `tools/bench/scale.py` and `compare.py` work with this program, and what they print.
//! The figures of such short runs mean nothing.

use super::support::{as_arg, fathom, short_dir};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn python(script: &str, args: &[&str]) -> Output {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/bench");
    let mut command = Command::new("python3");
    let output = command.arg(tools.join(script)).args(args).output();
    output.expect("python3 is installed by `make setup`")
}

/// Returns the points of the cases whose name begins with `name`.
fn points<'a>(told: &'a Value, name: &str) -> Vec<&'a Value> {
    let cases = told["cases"].as_array().expect("cases").iter();
    let of_name = cases.filter(|case| case["case"].as_str().expect("a name").starts_with(name));
    let points = of_name.flat_map(|case| case["points"].as_array().expect("points"));
    points.collect()
}

#[test]
fn each_curve_of_scale_has_an_efficiency_and_a_limiter() {
    let dir = short_dir();
    let json = dir.path().join("scale.json");
    let (program, json) = (as_arg(Path::new(fathom().get_program())), as_arg(&json));
    let args = [
        "--short", "--cpus", "2", "--json", &json, "--fathom", &program,
    ];
    let run = python("scale.py", &args);
    let (text, errors) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(run.status.success(), "{text}{errors}");
    let told = std::fs::read_to_string(json).expect("the figures");
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert!(told["program"].as_str().unwrap().starts_with("fathom"));
    for (curve, count) in [
        ("null disk: queues", 2),
        ("memory disk: queues", 2),
        ("tmpfs disk: queues", 2),
        ("memory disk over NBD: connections", 2),
        ("1 null disks", 1),
        ("3 null disks", 2),
        ("a busy null disk in a server with idle disks", 2),
        (
            "a busy null disk while its server adds and removes disks",
            2,
        ),
        ("upgrade of a server", 2),
        ("scrape of the metrics", 2),
    ] {
        let found = points(&told, curve);
        assert_eq!(found.len(), count, "{curve}: {text}{errors}");
        assert!(text.contains(curve), "{curve}: {text}");
        for point in found {
            assert!(point["efficiency"].as_f64().unwrap() >= 0.0, "{point}");
            let limiter = point["limiter"].as_str().unwrap();
            assert!(!limiter.is_empty() && text.contains(limiter), "{point}");
        }
    }
    for point in points(&told, "null disk: queues") {
        assert!(point["rate"].as_f64().unwrap() > 0.0, "{point}");
    }
    assert_eq!(points(&told, "10 idle disks").len(), 2, "{text}");
}

#[test]
fn scale_names_a_program_that_is_not_built() {
    let run = python("scale.py", &["--fathom", "/nowhere/fathom"]);
    let errors = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(2), "{errors}");
    let hint = "/nowhere/fathom is not built: run `make build`";
    assert!(errors.contains(hint), "{errors}");
}

#[test]
fn compare_tells_how_many_rounds_are_missing() {
    let dir = short_dir();
    let output = as_arg(&dir.path().join("run"));
    let program = as_arg(Path::new(fathom().get_program()));
    let short = ["--rounds", "2", "--seconds", "0.2", "--output", &output];
    let only = ["--only", "null-randread-4k-128"];
    let args = [&[program.as_str(), &program][..], &short, &only].concat();
    let run = python("compare.py", &args);
    let (text, errors) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(run.status.success(), "{text}{errors}");
    let verdict = text.lines().find(|line| line.contains("4k-128: IOPS"));
    let verdict = verdict.unwrap_or_else(|| panic!("no verdict: {text}{errors}"));
    assert!(verdict.ends_with("not enough rounds: 4 more"), "{verdict}");
    assert!(dir.path().join("run/run.json").exists());
}
