//! Tests `fathom report` as users run it, on a run of a server that was recorded on the host alone.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, io};

use fathom_run::{
    Clock, Clocks, Disk, Environment, Event, Kind, Pair, Round, Run, RunKind, StreamInfo,
    StreamWriter, VERSION,
};
use support::{Kept, eventually, fathom, refused, run, stdout_of};

/// Number of requests in the run.
const REQUESTS: u64 = 40;

/// Writes a run: each request spends 1 us in each stage of Fathom and 100 us in the device.
fn make_run(dir: &Path) {
    fs::create_dir_all(dir.join("requests-1")).unwrap();
    let path = dir.join("requests-1/fathom.events");
    let mut writer = StreamWriter::create(&path, 9, Vec::new()).unwrap();
    for i in 0..REQUESTS {
        let start = 1_000_000_000 + i * 1_000_000;
        let stamps = [1_000, 2_000, 3_000, 103_000, 104_000, 105_000].map(|ns| start + ns);
        let rest = Event::pack_fathom_rest(0, 0, 0);
        let args = [stamps.as_slice(), &[i * 4096, 4096, rest]].concat();
        let event = Event::new(start, Kind::FathomRequest, 0, 0, &args);
        writer.push(&event).unwrap();
    }
    let events = writer.finish().unwrap();
    let pair = |ns| Pair {
        tsc: ns * 2,
        monotonic_ns: ns,
    };
    let run = Run {
        version: VERSION,
        kind: RunKind::Host,
        title: "a run for tests".into(),
        created: 1_790_000_000,
        experiment: None,
        scenario: None,
        environment: Environment::default(),
        disks: vec![Disk {
            name: "disk0".into(),
            under_test: true,
            ..Disk::default()
        }],
        threads: Vec::new(),
        rounds: vec![Round {
            name: "requests-1".into(),
            traced: vec!["fathom".into()],
            clocks: Clocks {
                host: vec![pair(900_000_000), pair(2_000_000_000)],
                ..Clocks::default()
            },
            streams: vec![StreamInfo {
                name: "fathom".into(),
                clock: Clock::HostMonotonic,
                events,
                lost: Some(0),
            }],
            ..Round::default()
        }],
        problems: Vec::new(),
    };
    run.save(dir).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_run_is_printed_the_same_every_time_and_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (
        dir.path().join("here/a.run"),
        dir.path().join("there/a.run"),
    );
    make_run(&here);
    make_run(&there);
    let both = |options: &[&str]| {
        let print = |run: &Path| stdout_of(&[&["report", text(run)], options].concat());
        let (first, second) = (print(&here), print(&there));
        assert_eq!(first, second, "{options:?}");
        assert_eq!(first, print(&here), "{options:?}");
        first
    };
    let table = both(&[]);
    assert!(table.contains("a run for tests"), "{table}");
    assert!(table.contains("joined       40 of 40 requests"), "{table}");
    assert!(!table.contains('\x1b'), "no colours into a pipe: {table}");
    let json: serde_json::Value = serde_json::from_str(&both(&["--json"])).unwrap();
    assert_eq!(json["exact"]["total"]["count"], REQUESTS);
    // From the wake-up to the used ring; the interrupt was not recorded.
    assert_eq!(json["exact"]["total"]["mean"], 104_000.0);
    for name in ["a.pftrace", "b.pftrace"] {
        let file = dir.path().join(name);
        stdout_of(&["report", text(&here), "--perfetto", text(&file)]);
    }
    let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
    assert!(read("a.pftrace") == read("b.pftrace"));
    assert!(!read("a.pftrace").is_empty());
}

#[test]
fn several_runs_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ["a.run", "b.run"].map(|name| dir.path().join(name));
    runs.iter().for_each(|run| make_run(run));
    let table = stdout_of(&["report", text(&runs[0]), text(&runs[1])]);
    for words in ["A            a.run", "B            b.run", "B - A"] {
        assert!(table.contains(words), "no {words} in {table}");
    }
}

#[test]
fn tables_become_files() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a.run");
    make_run(&run);
    let (tables, layers) = (dir.path().join("tables"), dir.path().join("only.csv"));
    stdout_of(&["report", text(&run), "--csv", text(&tables)]);
    stdout_of(&["report", text(&run), "--csv", text(&layers)]);
    let written = fs::read_to_string(tables.join("layers.csv")).unwrap();
    assert_eq!(stdout_of(&["report", text(&run), "--csv", "-"]), written);
    assert_eq!(fs::read_to_string(layers).unwrap(), written);
    assert!(written.contains("host_io,"), "{written}");
    assert!(tables.join("requests.csv").exists());
}

#[test]
fn what_cannot_be_reported_is_told_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a.run");
    make_run(&run);
    let path = text(&run);
    refused(1, &["report", "/nonexistent"], &["not a run directory"]);
    refused(
        1,
        &["report", text(dir.path())],
        &["not a run directory", "run.json"],
    );
    refused(
        1,
        &["report", path, path, "--csv", "x"],
        &["--csv", "one run"],
    );
    refused(
        1,
        &["report", path, path, "--perfetto", "x"],
        &["--perfetto", "one run"],
    );
    let nowhere = "/nonexistent/file";
    refused(
        1,
        &["report", path, "--perfetto", nowhere],
        &["cannot write", nowhere],
    );
    fs::write(run.join("run.json"), "{\"version\": 99}").unwrap();
    refused(
        1,
        &["report", path],
        &["run.json", "version 99", "this fathom reads 1 to"],
    );
    fs::write(run.join("run.json"), "{\"version\": 1, \"kind\":").unwrap();
    refused(1, &["report", path], &["run.json", "damaged"]);
}

/// The command does not wait for a FIFO in the place of a file.
#[test]
fn only_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    for (name, succeeds, says) in [
        // This file counts as missing.
        ("requests-1/fathom.events", true, "Problems"),
        ("run.json", false, "not a regular file"),
    ] {
        make_run(dir.path());
        let path = dir.path().join(name);
        fs::remove_file(&path).unwrap();
        let made = Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let child = fathom()
            .args(["report", text(dir.path())])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = Kept(child.unwrap());
        let status = eventually("the end of `fathom report`", || child.0.try_wait().unwrap());
        let stdout = io::read_to_string(child.0.stdout.take().unwrap()).unwrap();
        let stderr = io::read_to_string(child.0.stderr.take().unwrap()).unwrap();
        let said = stdout + &stderr;
        assert!(said.contains(says), "{name}: {said}");
        assert_eq!(status.success(), succeeds, "{name}: {said}");
        fs::remove_file(&path).unwrap();
    }
}

/// Changes the contents of a run's run.json.
fn change(dir: &Path, change: impl FnOnce(&mut Run)) {
    let mut run = Run::load(dir).unwrap();
    change(&mut run);
    run.save(dir).unwrap();
}

/// A foreign run, for example one from a guest, does not choose which files are read and written.
#[test]
fn a_runs_files_are_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["other", "host", "guest", "joined"].map(|name| dir.path().join(name));
    let [other, host, guest, joined] = &paths;
    let join = [
        "breakdown",
        "--join",
        text(host),
        text(guest),
        "--output",
        text(joined),
    ];
    let again = || {
        for path in &paths {
            let _ = fs::remove_dir_all(path);
        }
        [other, host, guest]
            .into_iter()
            .for_each(|dir| make_run(dir));
        for dir in [other, guest] {
            change(dir, |run| {
                run.kind = RunKind::Guest;
                run.rounds[0].streams[0].name = "guest".into();
            });
            let folder = dir.join("requests-1");
            fs::rename(folder.join("fathom.events"), folder.join("guest.events")).unwrap();
        }
    };
    again();
    stdout_of(&join);

    let elsewhere = other.join("requests-1");
    for name in ["../other/requests-1", text(&elsewhere), "..", ""] {
        again();
        change(guest, |run| run.rounds[0].name = name.into());
        for args in [&join as &[&str], &["report", text(guest)]] {
            refused(1, args, &["run.json", "no name"]);
        }
        again();
        let stream = format!("{name}/guest");
        change(guest, |run| run.rounds[0].streams[0].name = stream);
        for args in [&join as &[&str], &["report", text(guest)]] {
            refused(1, args, &["run.json", "no name"]);
        }
    }

    let link = |at: &Path, to: &Path| {
        again();
        match at.is_dir() {
            true => fs::remove_dir_all(at).unwrap(),
            false => fs::remove_file(at).unwrap(),
        }
        std::os::unix::fs::symlink(to, at).unwrap();
        refused(1, &join, &["guest.events", "symbolic link"]);
        let said = stdout_of(&["report", text(guest)]);
        assert!(said.contains("symbolic"), "{said}");
        assert!(!joined.join("joined/guest.events").exists());
    };
    let events = elsewhere.join("guest.events");
    link(&guest.join("requests-1/guest.events"), &events);
    link(&guest.join("requests-1"), &elsewhere);

    again();
    let sparse = fs::File::create(guest.join("requests-1/guest.events")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    refused(1, &join, &["guest.events", "too large"]);
    // Two files would get the same name.
    again();
    change(host, |run| run.rounds[0].streams[0].name = "guest".into());
    let folder = host.join("requests-1");
    fs::rename(folder.join("fathom.events"), folder.join("guest.events")).unwrap();
    refused(1, &join, &["guest.events", "file exists"]);
    again();
    let stream = |n| StreamInfo {
        name: format!("{n}"),
        clock: Clock::HostMonotonic,
        events: 0,
        lost: None,
    };
    change(guest, |run| {
        run.rounds[0].streams = (0..1000).map(stream).collect()
    });
    refused(1, &join, &["run.json", "1000 files", "the most"]);
}

/// A foreign run sends no control characters to the terminal.
#[test]
fn names_of_disks_are_fit_for_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["host", "guest", "joined"].map(|name| dir.path().join(name));
    let [host, guest, joined] = paths.each_ref().map(|path| text(path));
    [host, guest]
        .into_iter()
        .for_each(|dir| make_run(dir.as_ref()));
    change(host.as_ref(), |run| {
        run.disks[0].name = "a\x1b[2Jdisk".into()
    });
    change(guest.as_ref(), |run| {
        run.kind = RunKind::Guest;
        run.rounds[0].streams.clear();
    });
    let output = run(&["breakdown", "--join", host, guest, "--output", joined]);
    assert!(output.status.success());
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("disk") && !said.contains('\x1b'), "{said}");
}

#[test]
fn a_file_of_events_that_is_missing_is_a_problem_and_no_end() {
    let dir = tempfile::tempdir().unwrap();
    make_run(dir.path());
    fs::remove_file(dir.path().join("requests-1/fathom.events")).unwrap();
    let output = run(&["report", text(dir.path())]);
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("Problems"), "{table}");
}

/// script(1) gives the command a terminal for its output.
#[test]
fn colours_are_for_terminals_and_for_those_who_want_them() {
    let dir = tempfile::tempdir().unwrap();
    make_run(&dir.path().join("run"));
    let shown = |no_colour: &str| {
        let command = format!("'{}' report run", env!("CARGO_BIN_EXE_fathom"));
        let output = std::process::Command::new("script")
            .args(["-qec", &command, "/dev/null"])
            .current_dir(dir.path())
            .env("NO_COLOR", no_colour)
            .stdin(std::process::Stdio::null())
            .output()
            .expect("script is part of bsdutils");
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(shown("").contains("\u{1b}["));
    assert!(!shown("1").contains("\u{1b}["));
}
