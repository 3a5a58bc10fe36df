//! Tests runs of `fathom lab run` that end early: what they report, and what they remove.

mod support;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use fathom_testing::until;
use support::{check_refusal, fathom, instead_of};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Returns the folders that a process of the lab has created.
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

/// Returns the number of processes that were started with a path in one of its folders.
fn children_of(pid: u32) -> usize {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    let word = format!("fathom-scratch-{pid}-");
    lines.filter(|line| line.contains(&word)).count()
}

/// Starts a run and waits until its guest boots. The run directory is created in `dir`.
fn run_under_way(dir: &Path) -> Child {
    let child = fathom()
        .args(["lab", "run", "seqread", "--size", "16M"])
        .current_dir(dir)
        .env_remove("TMPDIR")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    until("a guest and its server", || children_of(pid) >= 2);
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
    until("the end of its children", || children_of(pid) == 0);
    (pid, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_run_that_a_signal_ends_leaves_nothing_behind() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let made = |dir: &tempfile::TempDir| fs::read_dir(dir.path()).unwrap().count();
    let killed = run_under_way(dirs[0].path());
    let terminated = run_under_way(dirs[1].path());
    assert_eq!(made(&dirs[1]), 1);
    let (pid, said) = end(terminated, SIGTERM);
    assert_eq!(folders_of(pid), Vec::<PathBuf>::new());
    assert_eq!(said.lines().last(), Some("lab: ended by SIGTERM"), "{said}");
    assert!(!said.contains("fathom: "), "{said}");
    assert_eq!(made(&dirs[1]), 0, "no cell had ended");
    // The folders and processes of another run are not touched.
    assert!(!folders_of(killed.id()).is_empty());
    assert!(children_of(killed.id()) >= 2);

    let (pid, _) = end(killed, SIGKILL);
    assert!(!folders_of(pid).is_empty(), "nobody could remove them");
    // A run whose standard error is closed also ends. This run has removed the folders of the
    // killed run.
    let mut unread = run_under_way(dirs[2].path());
    drop(unread.stderr.take());
    let (own, _) = end(unread, SIGTERM);
    for pid in [pid, own] {
        assert_eq!(folders_of(pid), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_qemu_that_will_not_do_is_named() {
    for (script, words) in [
        (
            "echo 'QEMU emulator version 5.2.0 (Debian 1:5.2)'",
            ["QEMU 5.2 is too old: 6.0", "make setup"],
        ),
        ("echo a; echo b", ["prints no version", "'a'"]),
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

fn lab(args: &[&str], dir: &Path) -> (std::process::ExitStatus, String, String) {
    let output = fathom()
        .arg("lab")
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status, text(output.stdout), text(output.stderr))
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in [
        &["list"][..],
        &["describe", "wiki"],
        &["run", "seqread", "--dry-run"],
    ] {
        let (gone, stdout) = std::io::pipe().unwrap();
        drop(gone);
        let mut lab = fathom();
        lab.arg("lab").args(args).stdout(stdout);
        let output = lab.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{said}");
    }
}

#[test]
fn experiments_are_listed_described_and_planned_without_running() {
    let dir = tempfile::tempdir().unwrap();
    let (status, list, _) = lab(&["list"], dir.path());
    assert!(status.success());
    let names: Vec<&str> = list
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(
        names.contains(&"seqread") && names.contains(&"wiki"),
        "{list}"
    );
    for name in names {
        let (status, said, _) = lab(&["describe", name], dir.path());
        assert!(status.success() && said.contains("Parameters:"), "{said}");
        assert!(said.lines().all(|line| line.len() <= 100), "{said}");
        let (_, help, _) = lab(&["run", name, "--help"], dir.path());
        for option in said.lines().filter_map(|line| line.strip_prefix("  --")) {
            let option = option.split(':').next().unwrap();
            assert!(help.contains(&format!("--{option}")), "{option}: {help}");
        }
    }
    let args = [
        "run",
        "seqread",
        "--disk=qemu,fathom",
        "--rounds=2",
        "--seed=3",
        "--dry-run",
    ];
    let (status, plan, error) = lab(&args, dir.path());
    assert!(status.success(), "{error}");
    let cells: Vec<&str> = plan.lines().filter(|line| line.contains("disk=")).collect();
    assert_eq!(cells.len(), 4, "{plan}");
    assert!(plan.lines().last().unwrap().starts_with("about "), "{plan}");
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        0,
        "nothing was run"
    );
}

#[test]
fn what_the_page_of_sources_runs_can_be_run() {
    let page = include_str!("../../../docs/sources.md");
    let dir = tempfile::tempdir().unwrap();
    let commands = page
        .lines()
        .filter_map(|line| line.strip_prefix("    fathom lab "));
    let mut count = 0;
    for command in commands {
        let args: Vec<_> = command.split(' ').chain(["--dry-run"]).collect();
        let (status, _, said) = lab(&args, dir.path());
        assert!(status.success(), "{command}: {said}");
        count += 1;
    }
    assert!(count > 10, "{count}");
}

#[test]
fn what_cannot_be_run_is_said_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("there")).unwrap();
    for (args, code, words) in [
        (&["run"][..], 1, ["name an experiment", "--continue"]),
        (&["run", "moon"], 2, ["'moon'", "--help"]),
        (
            &["run", "--continue", "nowhere"],
            1,
            ["nowhere", "not a run directory"],
        ),
        (
            &["run", "seqread", "--output", "there"],
            1,
            ["exists already", "--continue"],
        ),
        (
            &["run", "seqread", "--size", "1"],
            2,
            ["--size", "1M to 1T"],
        ),
        (
            &["run", "seqread", "--until", "5"],
            2,
            ["--until", "width such as 5%"],
        ),
        (
            &["run", "seqread", "--max-time", "2h"],
            2,
            ["--until", "required"],
        ),
        (
            &["run", "seqread", "--disk", "socket:/none"],
            1,
            ["/none", "start its server"],
        ),
        (
            &["run", "seqread", "--disk=qsd", "--serve=--poll=off"],
            1,
            ["--poll=off", "qsd"],
        ),
        (&["describe", "moon"], 1, ["'moon'", "seqread, wiki, ffsb"]),
    ] {
        let (status, _, said) = lab(args, dir.path());
        let last = said.lines().last().unwrap_or_default();
        check_refusal(status, last, code, &words);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{args:?}");
    }
}

/// A run of three cells is interrupted in its second cell, and then resumed.
#[test]
fn an_interrupted_run_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "lab",
        "run",
        "seqread",
        "--size=16M",
        "--runtime=1",
        "--rounds=3",
        "--output=r",
    ];
    let child = fathom()
        .args(args)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let cells = || {
        let folders = fs::read_dir(dir.path().join("r/cells"))
            .into_iter()
            .flatten();
        let files = folders
            .flatten()
            .map(|folder| folder.path().join("cell.json"));
        files.filter(|file| file.is_file()).count()
    };
    until("a cell", || cells() == 1);
    let (_, said) = end(child, SIGTERM);
    assert!(
        said.contains("fathom lab run --continue r runs the rest"),
        "{said}"
    );
    assert_eq!(cells(), 1);
    let (status, _, said) = lab(&["run", "--continue", "r"], dir.path());
    assert!(status.success(), "{said}");
    assert!(said.contains("cell 1 of 2, round 2 of 3"), "{said}");
    assert_eq!(cells(), 3);
    let (status, plan, _) = lab(&["run", "--continue", "r", "--dry-run"], dir.path());
    assert!(
        status.success() && plan.starts_with("about "),
        "nothing is left: {plan}"
    );
    let wide = ["run", "--continue", "r", "--until=1000%", "--max-rounds=4"];
    let (status, table, said) = lab(&wide, dir.path());
    assert!(status.success(), "{said}");
    for words in [
        "round 4 follows: the only point: not enough rounds: 3 more",
        "the run ends after 4 rounds: --max-rounds 4 is reached; the only point",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(cells(), 4);
    assert!(table.contains("after 4 rounds: --max-rounds 4"), "{table}");
    let args = ["run", "--continue", "r", "--rounds=6", "--dry-run"];
    let (status, plan, said) = lab(&args, dir.path());
    assert!(status.success() && plan.contains("round 6"), "{plan}{said}");
    let (status, _, said) = lab(&["run", "--continue", "r", "--rounds=4"], dir.path());
    let last = said.lines().last().unwrap_or_default();
    check_refusal(status, last, 1, &["--rounds 4", "has 4 already"]);
}

/// Files that existed before are kept, even if the run has no cell yet.
#[test]
fn going_on_removes_nothing_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let (_, _) = end(run_under_way(dir.path()), SIGKILL);
    let run = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
    fs::write(run.path().join("mine"), "").unwrap();
    let none = tempfile::tempdir().unwrap();
    let output = fathom()
        .args(["lab", "run", "--continue"])
        .arg(run.path())
        .env(
            "PATH",
            instead_of("qemu-system-x86_64", "exit 3", none.path()),
        )
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(run.path().join("mine").is_file());
}
