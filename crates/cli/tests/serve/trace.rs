//! Checks traces, which the server writes and another process reads.

use crate::driver::{Request, with_disk};
use crate::support::{Served, eventually, fathom, refused, stdout_of};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

/// Waits until an active trace has this number of records. Clients may get a reply before its
/// record is written.
fn live(trace: &str, count: usize) -> Vec<Value> {
    let records = eventually("its records", || {
        let records = lines(&stdout_of(&["trace", "--json", trace]));
        (records.len() >= count).then_some(records)
    });
    assert_eq!(records.len(), count);
    records
}

#[test]
fn a_trace_from_the_start_has_every_request_with_its_times() {
    let dir = crate::support::short_dir();
    let trace = crate::support::as_arg(&dir.path().join("trace"));
    let mut served = Served::start("null:1T", &["--trace", &trace, "--iothreads", "2"]);
    served.load(
        5000,
        &[
            "--rw",
            "randrw",
            "--iodepth",
            "8",
            "--bs",
            "8k",
            "--queues",
            "2",
        ],
    );
    for is_live in [true, false] {
        let records = live(&trace, 10_000);
        let mut previous = 0;
        for record in &records {
            assert_eq!(record["disk"], "null:1099511627776");
            assert_eq!(record["len"], 8192);
            assert_eq!(record["offset"].as_u64().unwrap() % 8192, 0);
            assert_eq!(record["errno"], 0);
            assert_eq!(record["queue"], record["worker"]);
            let stages = record["stages"].as_object().unwrap();
            let parts = stages.iter().filter(|(name, _)| *name != "total_ns");
            let sum: f64 = parts.map(|(_, ns)| ns.as_f64().unwrap()).sum();
            let total = stages["total_ns"].as_f64().unwrap();
            assert!((sum - total).abs() < 1.0, "{record}");
            let end = record["stamps"][6].as_u64().unwrap();
            assert!(end >= previous, "sorted by their end");
            previous = end;
        }
        let ops: HashSet<_> = records.iter().map(|r| r["op"].as_str().unwrap()).collect();
        assert_eq!(ops, HashSet::from(["read", "write"]));
        if is_live {
            assert_eq!(served.terminate().0, Some(0));
        }
    }
    let text = stdout_of(&["trace", &trace]);
    assert_eq!(text.lines().count(), 10_001);
    let (head, rest) = text.split_once('\n').unwrap();
    assert!(head.starts_with("time (UTC)"), "{head}");
    let columns = |line: &str| line.split_whitespace().count();
    assert!(
        rest.lines()
            .all(|line| columns(line) == columns(rest.lines().next().unwrap()))
    );
}

#[test]
fn tracing_is_switched_on_and_off_under_load() {
    let served = Served::start("null:1T", &[]);
    let (control, trace) = (served.api(), served.arg("trace"));
    served.load(100, &[]);
    stdout_of(&["trace", "--pid", &control, "--on", &trace]);
    served.load(200, &[]);
    stdout_of(&["trace", "--pid", &control, "--off"]);
    served.load(400, &[]);
    assert_eq!(lines(&stdout_of(&["trace", "--json", &trace])).len(), 200);
    // A new trace replaces the old one.
    stdout_of(&["trace", "--pid", &control, "--on", &trace]);
    served.load(50, &[]);
    live(&trace, 50);
    fs::write(served.path("image"), "precious").unwrap();
    let image = served.arg("image");
    let on = ["trace", "--pid", &control, "--on", &image];
    refused(1, &on, &["not a trace"]);
    // The previous trace is still active.
    served.load(50, &[]);
    live(&trace, 100);
}

/// The trace is complete even if the server's thread continues late after its reply.
#[test]
fn a_trace_that_was_switched_off_has_all_that_clients_have_seen() {
    // The injector delays every other interrupt for this time.
    let served = Served::start("memory:1M", &["--inject", "notify=500ms"]);
    let (control, trace) = (served.api(), served.arg("trace"));
    with_disk(&served.arg("s"), 1, |disk| {
        for _ in 0..2 {
            stdout_of(&["trace", "--pid", &control, "--on", &trace]);
            disk.spin(&Request::Read {
                offset: 0,
                len: 512,
            });
            stdout_of(&["trace", "--pid", &control, "--off"]);
            assert_eq!(lines(&stdout_of(&["trace", "--json", &trace])).len(), 1);
        }
    });
}

#[test]
fn following_ends_with_the_trace() {
    let mut served = Served::start("null:1T", &[]);
    let trace = served.arg("trace");
    stdout_of(&["trace", "--pid", &served.api(), "--on", &trace]);
    let mut follower = fathom()
        .args(["trace", "--json", "--follow", &trace])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(follower.stdout.take().unwrap()).lines();
    for n in [10, 20] {
        served.load(n, &[]);
        for _ in 0..n {
            assert!(output.next().unwrap().unwrap().contains("stamps"));
        }
    }
    served.load(5, &[]);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!(output.count(), 5);
    assert!(follower.wait().unwrap().success());
}

#[test]
fn what_was_overwritten_is_counted() {
    let dir = crate::support::short_dir();
    let trace = crate::support::as_arg(&dir.path().join("trace"));
    let served = Served::start("null:1T", &["--trace", &trace]);
    served.load(100_000, &["--iodepth", "128"]);
    let records = eventually("all requests", || {
        let records = lines(&stdout_of(&["trace", "--json", &trace]));
        (records[0]["lost"] == 100_000 - 32_768).then_some(records)
    });
    assert_eq!(records.len() - 1, 32_768);
    let text = stdout_of(&["trace", &trace]);
    assert!(text.contains("(67232 requests were overwritten"));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let dir = crate::support::short_dir();
    let trace = crate::support::as_arg(&dir.path().join("trace"));
    let served = Served::start("null:1T", &["--trace", &trace]);
    served.load(20_000, &["--iodepth", "128"]);
    let mut reader = fathom()
        .args(["trace", &trace])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(reader.stdout.take());
    let output = reader.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Checks the reference for other instruments: an injected delay is only in its own stage, and as
/// large as the injector reports.
#[test]
fn an_injected_delay_is_found_in_its_stage() {
    // A front-end that finds its reply before it sleeps requests no interrupt. The filter delays
    // replies for long enough.
    let slow = ["--filter", "delay:read=20ms"];
    for (place, stage, options) in [
        ("queue", "queue", &[][..]),
        ("storage", "device", &[]),
        ("notify", "notify", &slow),
    ] {
        let inject = format!("{place}=100ms");
        let args = [&["--inject", &inject, "--json"], options].concat();
        let mut served = Served::start("null:1G", &args);
        served.load(20, &["--rw", "randread", "--iodepth", "1"]);
        let (status, out) = served.terminate();
        assert_eq!(status, Some(0), "{}", served.log());
        let json: Value = serde_json::from_str(&out).unwrap();
        let injected = &json["injected"];
        assert_eq!(injected["place"], place);
        let count = injected["count"].as_u64().unwrap();
        let least = if place == "notify" { 1 } else { 10 };
        assert!((least..=10).contains(&count), "{out}");
        let median = injected["p50_ns"].as_f64().unwrap();
        assert!(median >= 100e6, "{out}");
        let injected_mean = median * count as f64 / 20.0;
        for row in json["operations"][0]["stages"].as_array().unwrap() {
            let mean = row["mean_ns"].as_f64().unwrap();
            if row["stage"] == stage || row["stage"] == "total" {
                assert!(mean > 0.8 * injected_mean, "{place}: {row}");
            } else {
                // A loaded machine may delay the server in any stage, but not for half of the time.
                assert!(mean < 0.3 * median, "{place}: {row}");
            }
        }
    }
}

#[test]
fn truncated_trace_is_ended_and_the_disk_stays_served() {
    let dir = crate::support::short_dir();
    let trace = crate::support::as_arg(&dir.path().join("trace"));
    let mut served = Served::start("null:1T", &["--trace", &trace, "--iothreads", "2"]);
    let load = ["--rw", "randrw", "--iodepth", "8", "--queues", "2"];
    served.load(500, &load);
    let file = fs::OpenOptions::new().write(true).open(&trace).unwrap();
    file.set_len(0).unwrap();
    served.load(500, &load);
    served.wait_for("tracing has stopped");
    let log = served.log();
    let told = log.lines().filter(|line| line.contains("truncated"));
    assert_eq!(told.count(), 1, "{log}");
    assert!(
        log.contains(&format!("{trace}: truncated by another process")),
        "{log}"
    );
    refused(1, &["trace", &trace], &["not a trace"]);
    let info = stdout_of(&["info", &served.api(), "--json"]);
    assert!(info.contains("\"trace\":null"), "{info}");
    // The log suggests this command.
    let pid = served.api();
    stdout_of(&["trace", "--pid", &pid, "--on", &trace]);
    served.load(500, &load);
    live(&trace, 1000);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}
