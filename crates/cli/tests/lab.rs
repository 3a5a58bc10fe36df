//! `fathom lab run` when it cannot go on: what it says, and that it leaves nothing behind.

mod support;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::{PATIENCE, check_refusal, fathom};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// The folders that a process of the lab has made.
fn folders_of(pid: u32) -> Vec<PathBuf> {
    let prefix = format!("fathom-scratch-{pid}-");
    let entries = ["/tmp", "/var/tmp"].map(|dir| fs::read_dir(dir).unwrap());
    let paths = entries.into_iter().flatten().flatten().map(|e| e.path());
    let is_its = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(&prefix)
    };
    paths.filter(is_its).collect()
}

/// Processes that were started with a path in one of its folders.
fn children_of(pid: u32) -> usize {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    let word = format!("fathom-scratch-{pid}-");
    lines.filter(|line| line.contains(&word)).count()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run whose guest boots, with its server.
fn run_under_way() -> Child {
    let child = fathom()
        .args(["lab", "run", "seqread", "--size", "16M"])
        .env_remove("TMPDIR")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    wait_until("a guest and its server", || children_of(pid) >= 2);
    assert!(!folders_of(pid).is_empty());
    child
}

fn send(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: a system call on a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn end(child: Child, signal: i32) -> (u32, String) {
    let pid = child.id();
    send(&child, signal);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(signal), "{output:?}");
    wait_until("the end of its children", || children_of(pid) == 0);
    (pid, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_run_that_a_signal_ends_leaves_nothing_behind() {
    let killed = run_under_way();
    let terminated = run_under_way();
    let (pid, said) = end(terminated, SIGTERM);
    assert_eq!(folders_of(pid), Vec::<PathBuf>::new());
    assert_eq!(said.lines().last(), Some("lab: ended by SIGTERM"), "{said}");
    assert!(!said.contains("fathom: "), "{said}");
    // What another run holds is let alone.
    assert!(!folders_of(killed.id()).is_empty());
    assert!(children_of(killed.id()) >= 2);

    let (pid, _) = end(killed, SIGKILL);
    assert!(!folders_of(pid).is_empty(), "nobody could remove them");
    let (_, _) = end(run_under_way(), SIGTERM);
    assert_eq!(folders_of(pid), Vec::<PathBuf>::new());
}

/// A program of this name that comes first in PATH. Another process writes it: what this one has
/// open for writing, children of other tests have, too, until they exec, and then it cannot be run.
fn instead_of(name: &str, script: &str, dir: &Path) -> String {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
    let mut writer = Command::new("sh");
    writer.args(["-c", write, "sh", script]).arg(dir.join(name));
    assert!(writer.status().unwrap().success());
    let path = std::env::var("PATH").unwrap();
    format!("{}:{path}", dir.display())
}

#[test]
fn a_qemu_that_will_not_do_is_named() {
    for (script, words) in [
        (
            "echo 'QEMU emulator version 5.2.0 (Debian 1:5.2)'",
            ["QEMU 5.2 is too old: 6.0", "make setup"],
        ),
        ("echo a; echo b", ["tells no version", "'a'"]),
        ("echo broken >&2; exit 3", ["--version failed", "3"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let output = fathom()
            .args(["lab", "run", "wiki"])
            .env("PATH", instead_of("qemu-system-x86_64", script, dir.path()))
            .current_dir(dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let last = said.lines().last().unwrap_or_default();
        check_refusal(output.status, last, 1, &words);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "its own file");
    }
}
