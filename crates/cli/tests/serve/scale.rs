//! Checks that `tools/bench/scale.py` works with this program, and what it prints. The figures of
//! so short a run mean nothing.

use super::support::{as_arg, fathom, short_dir};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

fn script() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join("tools/bench/scale.py")
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
    let run = Command::new("python3")
        .arg(script())
        .args(["--short", "--cpus", "2", "--json", &as_arg(&json)])
        .arg("--fathom")
        .arg(fathom().get_program())
        .output()
        .expect("python3 is installed by `make setup`");
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
        ("a busy null disk while its server adds and removes disks", 2),
        ("upgrade of a server", 2),
        ("scrape of the metrics", 2),
    ] {
        let found = points(&told, curve);
        assert_eq!(found.len(), count, "{curve}: {text}{errors}");
        assert!(text.contains(curve), "{curve}: {text}");
        for point in found {
            assert!(point["efficiency"].as_f64().unwrap() > 0.0, "{point}");
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
    let run = Command::new("python3")
        .arg(script())
        .args(["--fathom", "/nowhere/fathom"])
        .output()
        .expect("python3 is installed by `make setup`");
    let errors = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(2), "{errors}");
    assert!(errors.contains("/nowhere/fathom is not built: run `make build`"), "{errors}");
}
