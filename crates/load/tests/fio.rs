//! Tests that fio accepts the generated jobs, and that its reports can be parsed.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fathom_load::files::fio::{Job, Scenario, job_file, make_file, parse};

/// Runs a job in `dir`, and returns fio's output.
fn fio(dir: &Path, text: &str) -> String {
    let file = dir.join("job.fio");
    std::fs::write(&file, text).unwrap();
    let mut fio = Command::new("fio");
    fio.arg("--output-format=json").arg(&file).current_dir(dir);
    let output = fio.output().expect("this test needs fio: run `make setup`");
    let (out, err) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}\n{text}");
    String::from_utf8(out).unwrap()
}

#[test]
fn fio_runs_every_scenario_and_its_report_is_understood() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    // fio would split this name at the colon without escaping.
    let files = dir.path().join("a:b");
    std::fs::create_dir(&files).unwrap();
    for (scenario, bs) in [
        (Scenario::LargeFileCreates, 256 << 10),
        (Scenario::LargeFileCreates, 8 << 10),
        (Scenario::SequentialReads, 256 << 10),
        (Scenario::SequentialReads, 8 << 10),
        (Scenario::RandomReads, 8 << 10),
        (Scenario::RandomWrites, 8 << 10),
        (Scenario::Mixed, 8 << 10),
    ] {
        let job = Job {
            scenario,
            dir: &files,
            threads: 2,
            scale: 0.005,
            runtime: Duration::from_millis(300),
            bs,
            direct: false,
        };
        for entry in std::fs::read_dir(&files).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let make = make_file(&job).unwrap();
        if !make.is_empty() {
            fio(dir.path(), &make);
        }
        let text = fio(dir.path(), &job_file(&job).unwrap());
        // All threads run for the whole time: fio reports the sum of their run times.
        if scenario != Scenario::LargeFileCreates {
            let json = &text[text.find('{').unwrap()..];
            let json: serde_json::Value = serde_json::from_str(json).unwrap();
            let spent = json["jobs"][0]["job_runtime"].as_u64().unwrap();
            assert!(spent >= 550, "{spent} ms of {} threads", job.threads);
        }
        let report = parse(&text, &job).unwrap();
        let found: Vec<&str> = report.operations.iter().map(|o| o.op.as_str()).collect();
        let expected: &[&str] = match scenario {
            Scenario::LargeFileCreates | Scenario::RandomWrites => &["write"],
            Scenario::SequentialReads | Scenario::RandomReads => &["read"],
            Scenario::Mixed => &["read", "write"],
        };
        assert_eq!(found, expected, "{scenario:?}");
        for o in &report.operations {
            assert_eq!(o.bytes, o.ios * u64::from(bs), "{scenario:?}");
            let median = o.latency.p50_ns.unwrap_or(0.0);
            assert!(o.latency.max_ns >= median && o.latency.mean_ns > 0.0);
        }
        assert!(report.iops > 0.0 && report.runtime > 0.0 && report.mb_per_s > 0.0);
        assert!(report.client_cpu_us_per_request > 0.0);
        if scenario == Scenario::Mixed {
            let share = report.operations[0].ios as f64 / (report.iops * report.runtime);
            assert!((0.6..0.8).contains(&share), "{share}");
        }
        // The job made more than one pass, and removed its files.
        if scenario == Scenario::LargeFileCreates {
            assert!(report.operations[0].bytes > 2 * (5 << 20), "{report}");
            assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0);
        }
        // All threads use the same files.
        if scenario == Scenario::SequentialReads {
            let names = std::fs::read_dir(&files).unwrap().flatten();
            let names = names.map(|e| e.file_name().into_string().unwrap());
            let shared = names.filter(|n| n.starts_with("fathom-fio."));
            assert_eq!(shared.count(), 5);
        }
    }
}
