//! Tracing this machine's kernel. What the kernel cannot do here is not tested here, and is said:
//! the guests of the end-to-end tests can all of it.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_lab::tracers::ftrace::Mode;
use fathom_lab::tracers::{Collected, Collector, Tracefs, futex, syscalls};
use fathom_run::{Event, Kind, Stream};

const READ: u64 = 0;
const WRITE: u64 = 1;
const FUTEX: u64 = 202;

/// The file system, unless this user may not trace; then the error must say what to do.
fn tracefs() -> Option<Tracefs> {
    match Tracefs::open() {
        Ok(tracefs) => Some(tracefs),
        Err(error) => {
            let said = error.to_string();
            assert!(!said.contains('\n'), "{said}");
            if rustix::process::geteuid().is_root() {
                assert!(
                    said.contains("CONFIG") || said.contains("lock") || said.contains("contain")
                );
            } else {
                assert!(said.contains("sudo"), "{said}");
            }
            eprintln!("NOT TESTED, since this kernel cannot be traced: {said}");
            None
        }
    }
}

/// A shell that waits for a line on its input before it runs the script.
fn waiting(script: &str) -> Child {
    Command::new("sh")
        .args(["-c", &format!("read go; {script}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn let_go(mut child: Child) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}

fn events(round: &Path, name: &str) -> Vec<Event> {
    let stream = Stream::open(&round.join(format!("{name}.events"))).unwrap();
    stream.map(Result::unwrap).collect()
}

fn count(events: &[Event], kind: Kind, nr: u64) -> usize {
    let of_it = |event: &&Event| event.kind == kind && event.args[0] == nr;
    events.iter().filter(of_it).count()
}

/// Records the system calls of a script.
fn record(tracefs: &Tracefs, mode: Mode, script: &str, round: &Path) -> Collected {
    let child = waiting(script);
    let threads = [child.id()];
    let options = syscalls::Options {
        threads: &threads,
        mode,
    };
    let running = syscalls::start(tracefs, &options).unwrap();
    let_go(child);
    Box::new(running).stop(round).unwrap()
}

#[test]
fn every_system_call_of_a_process_is_there_once() {
    let Some(tracefs) = tracefs() else { return };
    let dir = tempfile::tempdir().unwrap();
    for mode in [
        Mode::Buffered { kib_per_cpu: 8192 },
        Mode::Live { kib_per_cpu: 8192 },
    ] {
        // dd makes exactly one read and one write a block, and no more than some dozens besides.
        let script = "exec dd if=/dev/zero of=/dev/null bs=512 count=20000";
        let collected = record(&tracefs, mode, script, dir.path());
        assert_eq!(collected.problems, [""; 0], "{mode:?}");
        assert_eq!(collected.streams[0].lost, Some(0), "{mode:?}");
        let events = events(dir.path(), "syscalls");
        assert_eq!(events.len() as u64, collected.streams[0].events);
        for nr in [READ, WRITE] {
            let (enters, exits) = (
                count(&events, Kind::SysEnter, nr),
                count(&events, Kind::SysExit, nr),
            );
            assert!(
                (20_000..20_100).contains(&enters),
                "{mode:?} {nr}: {enters}"
            );
            // The read that the shell was in had begun before.
            assert!(
                (enters..=enters + 1).contains(&exits),
                "{mode:?} {nr}: {exits}"
            );
        }
        let blocks = |event: &&Event| {
            event.kind == Kind::SysEnter && event.args[0] == WRITE && event.args[3] == 512
        };
        assert_eq!(events.iter().filter(blocks).count(), 20_000, "{mode:?}");
        in_pairs(&events);
    }
}

/// Each thread enters and leaves in turn.
fn in_pairs(events: &[Event]) {
    let mut inside: HashMap<u32, u64> = HashMap::new();
    for event in events {
        match event.kind {
            Kind::SysEnter => {
                let before = inside.insert(event.tid, event.args[0]);
                assert!(before.is_none(), "two enters in a row: {event:?}");
            }
            Kind::SysExit => {
                let entered = inside.remove(&event.tid);
                assert!(entered.is_none_or(|nr| nr == event.args[0]), "{event:?}");
            }
            _ => {}
        }
    }
}

#[test]
fn what_does_not_fit_is_counted_to_the_last_event() {
    let Some(tracefs) = tracefs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let script = "exec dd if=/dev/zero of=/dev/null bs=512 count=5000";
    let mode = Mode::Buffered { kib_per_cpu: 4 };
    let collected = record(&tracefs, mode, script, dir.path());
    let stream = &collected.streams[0];
    let lost = stream.lost.unwrap();
    assert!(lost > 0);
    // Two calls a block, each an enter and an exit.
    assert!(stream.events + lost > 20_000, "{stream:?}");
    let told: u64 = events(dir.path(), "syscalls")
        .iter()
        .filter(|event| event.kind == Kind::Lost)
        .map(|event| event.args[0])
        .sum();
    assert_eq!(told, lost);
}

#[test]
fn futex_calls_come_with_their_address() {
    let Some(tracefs) = tracefs() else { return };
    let dir = tempfile::tempdir().unwrap();
    // xz waits for its threads by futexes.
    let child = waiting("head -c 20000000 /dev/zero | xz -T2 --block-size=1MiB");
    let options = futex::Options {
        threads: &[child.id()],
        mode: Mode::Live { kib_per_cpu: 1024 },
    };
    let running = futex::start(&tracefs, &options).unwrap();
    let_go(child);
    Box::new(running).stop(dir.path()).unwrap();
    let events = events(dir.path(), "futex");
    assert!(events.iter().all(|event| event.args[0] == FUTEX));
    let enters: Vec<_> = events.iter().filter(|e| e.kind == Kind::SysEnter).collect();
    assert!(!enters.is_empty() && enters.iter().all(|event| event.args[1] != 0));
}

#[test]
fn nothing_is_left_behind_not_even_by_the_killed() {
    let Some(tracefs) = tracefs() else { return };
    let instances = tracefs.root().join("instances");
    let killed = instances.join(format!("fathom_{}_999_killed", std::process::id()));
    std::fs::create_dir(&killed).unwrap();
    let instance = tracefs.instance("test").unwrap();
    let path = instance.path().to_owned();
    instance.enable("sched/sched_switch", None).unwrap();
    instance.on().unwrap();
    // Another run begins: it takes away what nobody owns, and nothing else.
    let other = Tracefs::open().unwrap();
    // Or one that began at the same time is just taking it away.
    let deadline = Instant::now() + Duration::from_secs(60);
    while killed.exists() {
        assert!(Instant::now() < deadline, "it is left");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(path.exists());
    drop(other);
    drop(instance);
    assert!(!path.exists());
}

#[test]
fn tracing_oneself_is_refused() {
    let Some(tracefs) = tracefs() else { return };
    let options = syscalls::Options {
        threads: &[std::process::id()],
        mode: Mode::Live { kib_per_cpu: 64 },
    };
    let refused = syscalls::start(&tracefs, &options).unwrap_err().to_string();
    assert!(refused.contains("tracer's own"), "{refused}");
}
