//! Tests `fathom bench DIR --workload mail-server`, as a user runs it.

mod support;

use std::process::Stdio;

use fathom_testing::until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{as_arg, fathom, refused, stdout_of};
use tempfile::TempDir;

/// Returns the arguments of `fathom` for a run in `dir`.
fn bench<'a>(dir: &'a str, args: &'a str) -> Vec<&'a str> {
    let head = ["bench", dir, "--workload", "mail-server"];
    head.into_iter().chain(args.split_whitespace()).collect()
}

fn is_empty(dir: &TempDir) -> bool {
    dir.path().read_dir().unwrap().next().is_none()
}

#[test]
fn it_prints_what_it_measured_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = as_arg(dir.path());
    let args = "--threads 3 --scale 0.003 --dirs 4 --number-ios 200 --buffered --verify";
    let out = stdout_of(&bench(&path, args));
    let head = "mail-server 8192 bytes, 3 threads, 300 files in 4 directories (buffered)";
    assert!(out.contains(head), "{out}");
    for word in [
        "create", "delete", "open", "read", "append", "p99.9", "verify:", "sync",
    ] {
        assert!(out.contains(word), "no {word} in {out}");
    }
    assert!(is_empty(&dir));
    let out = stdout_of(&bench(&path, &format!("{args} --json")));
    let json: Value = serde_json::from_str(&out).unwrap();
    let operations = json["operations"].as_array().unwrap();
    let ops: u64 = operations.iter().map(|o| o["ops"].as_u64().unwrap()).sum();
    assert_eq!(ops, 600);
    assert!(json["verify"]["checked"].as_u64().unwrap() > 0);
}

#[test]
fn wrong_arguments_are_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = as_arg(dir.path());
    for (status, args, words) in [
        (1, "--scale 2", "--scale must be above 0"),
        (1, "--threads 200", "--dirs is 100"),
        (1, "--bs 1000", "multiples of 512"),
        (1, "--files 2 --threads 3", "need a file each"),
        (2, "--weights read=1,write=2", "'write' is none of"),
        (2, "--rw randread", "cannot be used with"),
        (2, "--engine psync", "cannot be used with"),
        (2, "--vhost-user s", "cannot be used with"),
    ] {
        refused(status, &bench(&path, args), &[words]);
    }
    let missing = as_arg(&dir.path().join("missing"));
    refused(1, &bench(&missing, ""), &["missing", "no such file"]);
    refused(1, &["bench", &path], &["--workload mail-server"]);
    assert!(is_empty(&dir));
}

#[test]
fn ctrl_c_ends_it_early_and_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = as_arg(dir.path());
    let mut command = fathom();
    command.args(bench(
        &path,
        "--scale 0.001 --runtime 10m --buffered --json",
    ));
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(child.id() as i32).unwrap();
    // Under load, the files that were created first have been replaced.
    let first = |name: &str| {
        name.trim_start_matches('f')
            .parse()
            .is_ok_and(|id: u64| id < 100)
    };
    let is_loaded = || {
        let dirs = dir.path().read_dir().unwrap().flatten();
        let dirs = dirs.flat_map(|root| root.path().read_dir().into_iter().flatten().flatten());
        let mut files = dirs.flat_map(|d| d.path().read_dir().into_iter().flatten().flatten());
        files.any(|f| !first(&f.file_name().to_string_lossy()))
    };
    until("new files", is_loaded);
    kill_process(pid, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(json["iops"].as_f64().unwrap() > 0.0);
    assert!(is_empty(&dir));
}
