//! Tests `fathom breakdown` and `fathom guest record` with a running guest.
//!
//! These tests need a machine whose kernel they may trace.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fathom_lab::tracers::Tracefs;
use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_run::{Event, Kind, Run, RunKind, flags};
use fathom_testing::Deadline;

const FATHOM: &str = env!("CARGO_BIN_EXE_fathom");
const SOON: Duration = Duration::from_secs(120);
const READS: u64 = 500;
const BLOCK: u64 = 4096;

fn fathom(args: &[&str]) -> Output {
    Command::new(FATHOM).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8(text).unwrap()
}

fn events(dir: &Path, run: &Run, name: &str) -> Vec<Event> {
    let of_it = |round: &&fathom_run::Round| round.streams.iter().any(|one| one.name == name);
    let round = run.rounds.iter().find(of_it).unwrap();
    let stream = round.streams.iter().find(|one| one.name == name).unwrap();
    assert_eq!(stream.lost, Some(0), "{name}");
    round
        .open(dir, stream)
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

fn times(events: &[Event], kind: Kind) -> Vec<u64> {
    let of_it = events.iter().filter(|event| event.kind == kind);
    of_it.map(|event| event.time).collect()
}

/// Copies a folder out of the guest as text; the folder is small.
fn fetch(guest: &mut Guest, folder: &str, into: &Path) {
    let text = guest
        .check(&format!("tar -C {folder} -cz . | base64"), SOON)
        .unwrap();
    fs::create_dir_all(into).unwrap();
    let packed = into.join("packed");
    fs::write(&packed, text).unwrap();
    let unpack = format!(
        "base64 -d {0} | tar -C {1} -xz",
        packed.display(),
        into.display()
    );
    assert!(
        Command::new("sh")
            .args(["-c", &unpack])
            .status()
            .unwrap()
            .success()
    );
}

/// Records a guest from both sides at once. The guest's disks include a Fathom memory disk.
#[test]
fn both_sides_of_a_guest_are_recorded_and_put_together() {
    needs_tracing();
    let dir = tempfile::tempdir().unwrap();
    let server = |name| {
        Server::fathom(
            FATHOM.as_ref(),
            dir.path(),
            name,
            "memory:64M",
            &["--queues=1"],
        )
        .unwrap()
    };
    let (wanted, other) = (server("wanted"), server("other"));
    let disk = |name: &str, server: &Server| Disk::vhost_user(name, server.socket()).with_queues(1);
    let mut guest = Guest::boot(&Machine {
        disks: vec![disk("other", &other), disk("wanted", &wanted)],
        tools: false,
        programs: vec![FATHOM.into()],
        ..Machine::default()
    })
    .unwrap();
    let device = guest.device("wanted").unwrap();
    let name = device.trim_start_matches("/dev/").to_owned();
    guest
        .check(
            &format!("echo none >/sys/block/{name}/queue/scheduler"),
            SOON,
        )
        .unwrap();

    let (host, inside) = (dir.path().join("host.run"), dir.path().join("guest.run"));
    let pid = guest.pid().to_string();
    let host_arg = host.to_str().unwrap();
    let refused = fathom(&["breakdown", "--pid", &pid, "--output", host_arg]);
    assert!(said(&refused).contains("choose one with --disk: other, wanted"));
    let mut recording = Command::new(FATHOM)
        .args([
            "breakdown",
            "--pid",
            &pid,
            "--disk",
            "wanted",
            "--seconds",
            "600",
        ])
        .args(["--output", host_arg])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The folder for events is created when the recording of events starts.
    let deadline = Deadline::new("a recording");
    while !host.join("layers").exists() {
        assert_eq!(recording.try_wait().unwrap(), None, "it goes on recording");
        deadline.pause();
    }
    let other_name = guest.device("other").unwrap();
    let script = format!(
        "fathom guest record --device {name} --seconds 600 --output /tmp/guest.run >/tmp/said 2>&1 &
        record=$!
        until grep -qs recording /tmp/said; do sleep 0.1; done
        dd if={device} of=/dev/null bs={BLOCK} count={READS} iflag=direct 2>/dev/null
        dd if={other_name} of=/dev/null bs={BLOCK} count=20 iflag=direct 2>/dev/null
        dd if=/dev/zero of={device} bs={BLOCK} seek=7 count=1 oflag=direct 2>/dev/null
        kill -INT $record; wait $record; cat /tmp/said
        mount -t tracefs none /sys/kernel/tracing
        ls /sys/kernel/tracing/instances; cat /sys/kernel/tracing/kprobe_events"
    );
    let text = guest.check(&script, SOON).unwrap();
    // Two lines: no event was lost, no problem occurred, and no instance or probe is left. The file
    // system was unmounted again, so it could be mounted.
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains("events in /tmp/guest.run"), "{text}");
    fetch(&mut guest, "/tmp/guest.run", &inside);
    check_guest(&inside, &name);

    // The same signal ends the host's recording early.
    let interrupt = ["-INT", &recording.id().to_string()].map(str::to_owned);
    assert!(
        Command::new("kill")
            .args(interrupt)
            .status()
            .unwrap()
            .success()
    );
    let output = recording.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    check_host(&host, &said(&output), wanted.api().is_some());

    let joined = dir.path().join("joined.run");
    let paths = [&host, &inside, &joined].map(|path| path.to_str().unwrap());
    let args = [
        "breakdown",
        "--join",
        paths[0],
        paths[1],
        "--output",
        paths[2],
    ];
    let output = fathom(&args);
    assert!(output.status.success(), "{}", said(&output));
    let run = Run::load(&joined).unwrap();
    assert_eq!(run.kind, RunKind::Joined);
    assert_eq!(
        run.disk().unwrap().guest_name.as_deref(),
        Some(name.as_str())
    );
    let requests = events(&joined, &run, "fathom");
    assert_eq!(requests.len() as u64, READS + 1);
    assert!(!events(&joined, &run, "guest").is_empty());
    guest.power_off().unwrap();
}

/// Fails with an explanation if this kernel cannot be traced.
fn needs_tracing() {
    if let Err(error) = Tracefs::open() {
        panic!(
            "this test lacks the right to trace the kernel that it runs on: run it as root, on a \
             machine with tracefs ({error})"
        );
    }
}

/// The guest's kernel did what dd did, in the order of the kernel's code.
fn check_guest(dir: &Path, name: &str) {
    let run = Run::load(dir).unwrap();
    assert_eq!(
        (run.kind, run.problems.len()),
        (RunKind::Guest, 0),
        "{:?}",
        run.problems
    );
    let disk = run.disk().unwrap();
    assert_eq!(disk.guest_name.as_deref(), Some(name));
    assert_eq!((disk.guest_vqs.len(), disk.guest_irqs.len()), (1, 1));
    let vq = disk.guest_vqs[0];
    let events = events(dir, &run, "guest");
    let issues: Vec<&Event> = events
        .iter()
        .filter(|e| e.kind == Kind::BlockRqIssue)
        .collect();
    assert_eq!(issues.len() as u64, READS + 1);
    for (index, issue) in issues.iter().enumerate() {
        let is_write = index as u64 == READS;
        let sector = if is_write { 7 } else { index as u64 } * BLOCK / 512;
        assert_eq!(
            issue.args[..3],
            [disk.guest_dev.unwrap(), sector, BLOCK / 512]
        );
        assert_eq!(issue.args[3] & flags::WRITE != 0, is_write, "{issue:?}");
    }
    let dones = times(&events, Kind::BlockRqComplete);
    assert_eq!(dones.len(), issues.len());
    let of_queue = |kind: Kind, arg: usize| -> Vec<u64> {
        let of_it = events
            .iter()
            .filter(|e| e.kind == kind && e.args[arg] == vq);
        of_it.map(|event| event.time).collect()
    };
    let kicks = of_queue(Kind::VpNotify, 0);
    let interrupts = of_queue(Kind::VringInterrupt, 1);
    let done_calls = of_queue(Kind::VirtblkDone, 0);
    // Requests are made one at a time, so each has its interrupt. A request has no kick if the
    // server is polling.
    assert!(interrupts.len() >= issues.len() && done_calls.len() >= issues.len());
    for (issue, done) in issues.iter().zip(&dones) {
        let between = |times: &[u64]| times.iter().any(|time| (issue.time..=*done).contains(time));
        assert!(between(&interrupts) && between(&done_calls), "{issue:?}");
    }
    assert!(!kicks.is_empty());
    // The probes also saw the other disk's queue, but it is not counted with this disk's.
    let all_kicks = times(&events, Kind::VpNotify).len();
    assert!(all_kicks >= kicks.len());
    let drivers = times(&events, Kind::VirtioQueueRq).len();
    assert!(drivers as u64 > READS, "{drivers}");
    let entries = events.iter().filter(|e| e.kind == Kind::IrqHandlerEntry);
    assert!(entries.clone().count() >= interrupts.len());
    assert!(
        entries
            .clone()
            .all(|event| disk.guest_irqs.contains(&event.args[0]))
    );
}

fn check_host(dir: &Path, said: &str, has_control: bool) {
    assert!(has_control);
    let run = Run::load(dir).unwrap();
    assert_eq!(run.kind, RunKind::Host);
    assert!(
        said.contains("* wanted  vhost-user-blk, served by process"),
        "{said}"
    );
    assert!(
        said.contains("accel=") || run.environment.accelerator == "kvm",
        "{said}"
    );
    let requests = events(dir, &run, "fathom");
    assert_eq!(requests.len() as u64, READS + 1);
    let last = requests.last().unwrap();
    assert_eq!((last.args[6], last.args[7]), (7 * BLOCK, BLOCK));
    assert_eq!(last.fathom_rest().1 & flags::WRITE, flags::WRITE);
    let workers: Vec<u32> = run
        .threads
        .iter()
        .filter(|t| t.name == "worker 0")
        .map(|t| t.tid)
        .collect();
    assert!(
        requests
            .iter()
            .all(|request| workers.contains(&request.tid))
    );
}

#[test]
fn what_cannot_be_recorded_is_said_in_one_line() {
    needs_tracing();
    let dir = tempfile::tempdir().unwrap();
    let one_line = |args: &[&str], part: &str| {
        let output = fathom(args);
        let said = said(&output);
        assert!(
            !output.status.success() && said.lines().count() == 1,
            "{said}"
        );
        assert!(said.contains(part), "{said}");
    };
    one_line(&["breakdown"], "--pid");
    one_line(
        &["breakdown", "--pid", "1", "--seconds", "0"],
        "must be 10ms to 1h",
    );
    let here = dir.path().to_str().unwrap();
    one_line(&["breakdown", "--join", here, here], "not a run directory");
    one_line(&["breakdown", "--pid", "4194305"], "no process 4194305");
    let us = std::process::id().to_string();
    one_line(&["breakdown", "--pid", &us], "no QEMU");
    let nothere = ["guest", "record", "--device", "nothere", "--output", here];
    one_line(&nothere, "disk named nothere not found");
}

/// A kernel that traces only the block layer gives half a recording, which lacks what a breakdown
/// is joined with.
///
/// A kernel that traces all layers, or none, passes as well.
#[test]
fn a_recording_without_the_guests_layers_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = Command::new(FATHOM)
        .args(["guest", "record", "--seconds", "10ms", "--output"])
        .arg(dir.path().join("run"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&recorded.stderr);
    let complete = !["cannot", "has no", "not found", "needs root"]
        .iter()
        .any(|word| said.contains(word));
    assert_eq!(recorded.status.success(), complete, "{said}");
}
