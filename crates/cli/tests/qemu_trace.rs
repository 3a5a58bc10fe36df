//! Tests `fathom breakdown --qemu-trace` on the output of QEMU's log backend and of its simple
//! backend.
//!
//! The logs were captured from QEMU 10.0. Distributions do not build the simple backend, so the
//! captured logs are encoded here, in the layout that QEMU's trace/simple.c writes, with the
//! installed trace-events-all.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::{refused, run, stdout_of};

const EVENTS: &str = "/usr/share/qemu/trace-events-all";
const DROPPED: u64 = u64::MAX - 1;

fn captured(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/tests/data/qemu");
    data.join(format!("{name}-10.0.log"))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the names of a build's events, in the order of their numbers.
fn names() -> Vec<String> {
    let events = fs::read_to_string(EVENTS).expect("QEMU is installed (make setup)");
    let lines = events.lines().filter(|line| !line.starts_with('#'));
    let heads = lines.filter_map(|line| line.split_once('('));
    heads
        .map(|(head, _)| head.split(' ').next_back().unwrap().to_owned())
        .collect()
}

/// Encodes a captured log as the simple backend would have written it.
///
/// If `dropped`, the last record reports 3 dropped events.
fn simple(log: &Path, version: u64, dropped: bool) -> Vec<u8> {
    let names = names();
    let mut bytes = words(&[u64::MAX, 0xf2b1_77cb_0aa4_29b4, version]);
    let mut mapped = Vec::new();
    let mut last = 0;
    for line in fs::read_to_string(log).unwrap().lines() {
        let (prefix, event) = line.split_once(':').unwrap();
        let (_, time) = prefix.split_once('@').unwrap();
        last = time.replace('.', "").parse::<u64>().unwrap() * 1000;
        let (name, args) = event.split_once(' ').unwrap();
        let id = names.iter().position(|known| known == name).unwrap() as u64;
        if version == 4 && !mapped.contains(&id) {
            mapped.push(id);
            bytes.extend(words(&[0, id]));
            bytes.extend((name.len() as u32).to_ne_bytes());
            bytes.extend(name.as_bytes());
        }
        let args: Vec<u64> = args.split(' ').filter_map(number).collect();
        record(&mut bytes, version, id, last, &args);
    }
    if dropped {
        record(&mut bytes, version, DROPPED, last + 1, &[3]);
    }
    bytes
}

fn record(bytes: &mut Vec<u8>, version: u64, id: u64, time: u64, args: &[u64]) {
    if version == 4 {
        bytes.extend(words(&[1]));
    }
    bytes.extend(words(&[id, time]));
    bytes.extend((24 + 8 * args.len() as u32).to_ne_bytes());
    bytes.extend(77u32.to_ne_bytes());
    bytes.extend(words(args));
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

/// Returns the steps with their number and mean, as `fathom report --json` prints them.
fn steps(run: &Path) -> Vec<(String, u64, f64)> {
    let json: Value = serde_json::from_str(&stdout_of(&["report", text(run), "--json"])).unwrap();
    let rows = json["qemu"].as_array().unwrap().iter();
    rows.map(|row| {
        let time = &row["time"];
        (
            row["wiki"].as_str().unwrap().to_owned(),
            time["count"].as_u64().unwrap(),
            time["mean"].as_f64().unwrap(),
        )
    })
    .collect()
}

#[test]
fn both_backends_give_the_same_table() {
    let dir = tempfile::tempdir().unwrap();
    for (name, step) in [
        ("threads", "thread_pool_complete_aio"),
        ("native", "io_submit()"),
        ("io_uring", "luring_process_completion"),
    ] {
        let from_log = dir.path().join(format!("{name}.run"));
        let log = captured(name);
        let trace = ["breakdown", "--qemu-trace", text(&log)];
        let table = stdout_of(&[&trace[..], &["-o", text(&from_log)]].concat());
        for words in ["Steps within QEMU", "virtio_blk_rw_complete", step, "(log)"] {
            assert!(table.contains(words), "{name}: no {words} in {table}");
        }
        assert!(!table.contains("Problems"), "{name}: {table}");
        let wanted = steps(&from_log);
        let measured = wanted.iter().filter(|(_, count, _)| *count > 5);
        assert!(measured.count() >= 3, "{name}: {wanted:?}");
        for version in [2, 3, 4] {
            let file = dir.path().join(format!("{name}-{version}"));
            fs::write(&file, simple(&log, version, false)).unwrap();
            let run = dir.path().join(format!("{name}-{version}.run"));
            let trace = ["breakdown", "--qemu-trace", text(&file)];
            let rest = ["--qemu-events", EVENTS, "-o", text(&run)];
            let table = stdout_of(&[&trace[..], &rest].concat());
            assert!(table.contains("(simple)"), "{table}");
            assert!(table.contains("names no threads"), "{table}");
            assert_eq!(steps(&run), wanted, "{name}, format {version}");
        }
    }
}

#[test]
fn what_is_missing_in_a_trace_is_said_and_the_rest_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let (file, run_dir) = (dir.path().join("trace"), dir.path().join("a.run"));
    let whole = simple(&captured("threads"), 4, true);
    fs::write(&file, &whole).unwrap();
    let args = ["breakdown", "--qemu-trace", text(&file)];
    let rest = ["--qemu-events", EVENTS, "-o", text(&run_dir)];
    let table = stdout_of(&[&args[..], &rest].concat());
    let joined = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("QEMU dropped 3 events"), "{table}");
    fs::write(&file, &whole[..whole.len() - 60]).unwrap();
    fs::remove_dir_all(&run_dir).unwrap();
    let table = stdout_of(&[&args[..], &rest].concat());
    let joined = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("its last record is cut off"), "{table}");
    assert!(table.contains("thread_pool_complete_aio"), "{table}");
    // A log may be cut off, too. If no run is named, the run is created in the working directory.
    let log = fs::read(captured("threads")).unwrap();
    fs::write(&file, &log[..log.len() - 30]).unwrap();
    let output = support::fathom()
        .args(args)
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let joined = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("its last line is cut off"), "{table}");
    assert!(dir.path().join("trace.run/run.json").exists());
}

#[test]
fn what_is_no_trace_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace");
    let run_dir = dir.path().join("a.run");
    let refuse = |bytes: &[u8], events: &[&str], words: &[&str]| {
        fs::write(&file, bytes).unwrap();
        let args = ["breakdown", "-o", text(&run_dir), "--qemu-trace"];
        refused(1, &[&args[..], &[text(&file)], events].concat(), words);
        assert!(!run_dir.exists(), "nothing is left behind");
    };
    let events = ["--qemu-events", EVENTS];
    let trace = simple(&captured("native"), 4, false);
    refuse(&trace, &[], &["simple backend", "--qemu-events"]);
    let missing = ["--qemu-events", "/nonexistent/events"];
    refuse(
        &trace,
        &missing,
        &["cannot read", missing[1], "no such file"],
    );
    let other = ["--qemu-events", "/etc/passwd"];
    refuse(&trace, &other, &["/etc/passwd", "no trace event"]);
    refuse(&trace[..20], &events, &["not a trace of QEMU's simple"]);
    refuse(&trace[..60], &events, &["no events"]);
    refuse(b"", &[], &["empty; enable trace events"]);
    refuse(b"\x7fELF\x02\x01\x01\0\0\0", &[], &["neither a log nor"]);
    refuse(b"hello, world\n", &[], &["no trace events"]);
    let bare = "virtio_notify vdev 0x1 vq 0x2\n";
    refuse(bare.as_bytes(), &[], &["-msg timestamp=on"]);
    refused(1, &["breakdown", "--qemu-trace", "/"], &["cannot read /"]);
    let gone = ["breakdown", "--qemu-trace", "/nonexistent/trace"];
    refused(1, &gone, &["cannot read /nonexistent/trace"]);
    let both = ["breakdown", "--pid", "1", "--qemu-trace", "x"];
    refused(2, &both, &["--qemu-trace", "cannot be used with"]);
    refused(2, &["breakdown", "--qemu-events", "x"], &["--qemu-trace"]);
    refused(2, &["breakdown"], &["--pid", "--join", "--qemu-trace"]);
    // A run is never overwritten.
    fs::create_dir(&run_dir).unwrap();
    fs::write(run_dir.join("run.json"), "{}").unwrap();
    let log = captured("native");
    let again = [
        "breakdown",
        "--qemu-trace",
        text(&log),
        "-o",
        text(&run_dir),
    ];
    refused(1, &again, &["already contains a run"]);
    assert_eq!(fs::read(run_dir.join("run.json")).unwrap(), b"{}");
}

/// Without the names of threads, one thread could seem to end the wait of another.
#[test]
fn locks_are_told_only_where_threads_are() {
    let dir = tempfile::tempdir().unwrap();
    let locks = |file: &Path| {
        let run_dir = dir.path().join("locks.run");
        let args = [
            "breakdown",
            "-o",
            text(&run_dir),
            "--qemu-trace",
            text(file),
        ];
        assert!(run(&args).status.success());
        let json = stdout_of(&["report", text(&run_dir), "--json"]);
        fs::remove_dir_all(&run_dir).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        json["locks"].as_array().unwrap().len()
    };
    let log = captured("mutexes");
    assert!(locks(&log) > 0);
    let anonymous: String = fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| format!("0@{}\n", line.split_once('@').unwrap().1))
        .collect();
    let file = dir.path().join("anonymous.log");
    fs::write(&file, anonymous).unwrap();
    assert_eq!(locks(&file), 0);
}
