//! Checks that the program has the documented probes with their arguments, and that the bpftrace
//! scripts work.

use crate::support::{Kept, Served, as_arg, short_dir};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Returns the name of each probe in the program, and its number of arguments, as tracers see them.
fn built_in() -> BTreeMap<String, usize> {
    let output = Command::new("readelf")
        .args(["--notes", "--wide", env!("CARGO_BIN_EXE_fathom")])
        .output()
        .expect("readelf comes with build-essential");
    let notes = String::from_utf8(output.stdout).unwrap();
    let mut found = BTreeMap::new();
    for note in notes.split("Provider: fathom\n").skip(1) {
        let field = |name: &str| {
            let line = { note.lines() }.find_map(|line| line.trim().strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {note}")).trim()
        };
        let arguments: Vec<_> = field("Arguments:").split_whitespace().collect();
        // Each argument has 64 bits.
        assert!(
            { arguments.iter() }.all(|one| one.starts_with("-8@")),
            "{note}"
        );
        let count = arguments.len();
        let before = found.insert(field("Name:").to_owned(), count);
        assert!(before.is_none_or(|before| before == count), "{note}");
    }
    found
}

/// Returns the same from the tables in docs/probes.md.
fn documented() -> BTreeMap<String, usize> {
    let doc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/probes.md");
    let text = fs::read_to_string(doc).unwrap();
    let rows = text.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
        let (arguments, _) = rest.split_once('|')?;
        let arguments = arguments.split(',').filter(|one| !one.trim().is_empty());
        Some((name.to_owned(), arguments.count()))
    });
    // Leaves out the table of scripts.
    rows.filter(|(name, _)| !name.contains('.')).collect()
}

#[test]
fn probes_are_those_that_are_documented() {
    let documented = documented();
    assert!(documented.len() >= 10, "{documented:?}");
    assert_eq!(built_in(), documented);
}

/// Runs bpftrace for a number of seconds, or until it ends.
fn bpftrace(seconds: &str, args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--signal=INT", "--kill-after=30", seconds, "bpftrace"]);
    command.args(args).output().expect("timeout")
}

/// Runs a script of packaging/bpftrace on a server for some seconds. Returns what it prints.
fn said(script: &str, served: &Served) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging/bpftrace")
        .join(script);
    let text = fs::read_to_string(script).unwrap();
    let dir = short_dir();
    let here = dir.path().join("script.bt");
    let probe = "usdt:/usr/bin/fathom:";
    assert!(text.contains(probe));
    let own = format!("usdt:{}:", env!("CARGO_BIN_EXE_fathom"));
    fs::write(&here, text.replace(probe, &own)).unwrap();
    let pid = served.child.id().to_string();
    let output = bpftrace("6", &["-p", &pid, &as_arg(&here)]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.lines().count() > 5, "{stdout}{stderr}");
    stdout
}

#[test]
fn scripts_tell_of_requests_and_of_threads() {
    let tried = bpftrace("60", &["-e", "BEGIN { exit() }"]);
    assert!(
        tried.status.success(),
        "bpftrace needs root and a kernel with uprobes: {tried:?}"
    );
    let options = ["--poll", "20us", "--filter", "delay:read=2ms"];
    let served = Served::start("memory:16M", &options);
    let load = ["--rw", "randrw", "--iodepth", "2"];
    let _load = Kept(served.start_load(1_000_000_000, &load));
    let latency = said("fathom-biolatency.bt", &served);
    for histogram in [
        "@us_of_read",
        "@us_of_write",
        "@us_in_2_queue",
        "@us_in_6_notify",
    ] {
        assert!(latency.contains(histogram), "{latency}");
    }
    let snooped = said("fathom-biosnoop.bt", &served);
    let reads: Vec<Vec<u64>> = { snooped.lines() }
        .filter_map(|line| {
            let (_, numbers) = line.split_once("worker 0 ")?;
            let numbers = numbers.split_whitespace().map(|one| one.parse().unwrap());
            Some(numbers.collect())
        })
        .filter(|numbers: &Vec<u64>| numbers[0] == 0)
        .collect();
    assert!(reads.len() > 10, "{snooped}");
    for read in &reads {
        let [_, offset, len, error, total, _, queue, ..] = read[..] else {
            panic!("{read:?}");
        };
        assert_eq!((offset % 4096, len, error), (0, 4096, 0), "{read:?}");
        // The script derives the length of a tick from half a second, which may be wrong by some
        // microseconds.
        assert!(queue >= 1950 && total >= queue, "{read:?}");
    }
    let polls = said("fathom-polls.bt", &served);
    for what in ["found]: ", "in vain]: ", "sleeps]: ", "@slept_us["] {
        assert!(polls.contains(what), "{polls}");
    }
}
