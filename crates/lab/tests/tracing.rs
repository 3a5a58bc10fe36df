//! Tracing a kernel: that of this machine, or where it cannot be traced (it is without tracing, or
//! we without the right to it) that of a guest, in which this same program runs.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_lab::tracers::ftrace::Mode;
use fathom_lab::tracers::{Collected, Collector, Tracefs, futex, syscalls};
use fathom_lab::{Guest, Machine, program};
use fathom_run::{Event, Kind, Stream};
use fathom_testing::until;

const READ: u64 = 0;
const WRITE: u64 = 1;
const FUTEX: u64 = 202;

/// A test by its name.
type Test = (&'static str, fn(&Tracefs));

/// The tests, which run one after the other, because some check everything that is being traced.
const TESTS: [Test; 5] = [
    (
        "every system call of a process is there once",
        every_system_call_of_a_process_is_there_once,
    ),
    (
        "what does not fit is counted to the last event",
        what_does_not_fit_is_counted_to_the_last_event,
    ),
    (
        "futex calls come with their address",
        futex_calls_come_with_their_address,
    ),
    (
        "nothing is left behind, not even by the killed",
        nothing_is_left_behind_not_even_by_the_killed,
    ),
    ("tracing oneself is refused", tracing_oneself_is_refused),
];

/// Set where this program is in a guest.
const IN_GUEST: &str = "FATHOM_IN_GUEST";

#[test]
fn a_kernel_is_traced() {
    let was_mounted = is_mounted();
    match Tracefs::open() {
        Ok(tracefs) => {
            for (name, test) in TESTS {
                println!("{name}");
                test(&tracefs);
            }
            println!("who mounted it does not unmount it while another uses it");
            let other = Tracefs::open().unwrap();
            drop(tracefs);
            assert!(other.has_event("sched/sched_switch"));
            drop(other);
            assert_eq!(is_mounted(), was_mounted);
        }
        Err(error) => {
            let said = error.to_string();
            assert!(std::env::var_os(IN_GUEST).is_none(), "in a guest: {said}");
            says_what_to_do(&said);
            in_a_guest();
        }
    }
}

/// Whether another program has mounted tracefs. (A mount of a lab that was killed is removed by the
/// next lab.)
fn is_mounted() -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mut mounts = mounts.lines().filter(|mount| mount.contains(" tracefs "));
    mounts.any(|mount| !mount.starts_with("fathom "))
}

fn says_what_to_do(said: &str) {
    assert!(!said.contains('\n'), "{said}");
    let words: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["CONFIG", "lock", "contain"],
        false => &["sudo"],
    };
    assert!(words.iter().any(|word| said.contains(word)), "{said}");
}

fn in_a_guest() {
    let this = std::env::current_exe().unwrap();
    let name = this.file_name().unwrap().to_str().unwrap();
    let run = format!("{IN_GUEST}=1 {name} --exact a_kernel_is_traced --nocapture 2>&1");
    let mut guest = Guest::boot(&Machine {
        tools: false,
        programs: vec![this.clone(), program("xz").unwrap()],
        ..Machine::default()
    })
    .unwrap();
    let said = guest.check(&run, Duration::from_secs(300)).unwrap();
    for (name, _) in TESTS {
        assert!(said.contains(name), "{said}");
    }
    guest.power_off().unwrap();
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

fn every_system_call_of_a_process_is_there_once(tracefs: &Tracefs) {
    let dir = tempfile::tempdir().unwrap();
    for mode in [
        Mode::Buffered { kib_per_cpu: 8192 },
        Mode::Live { kib_per_cpu: 8192 },
    ] {
        // dd makes exactly one read and one write a block, and no more than some dozens besides.
        let script = "exec dd if=/dev/zero of=/dev/null bs=512 count=20000";
        let collected = record(tracefs, mode, script, dir.path());
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

fn what_does_not_fit_is_counted_to_the_last_event(tracefs: &Tracefs) {
    let dir = tempfile::tempdir().unwrap();
    let script = "exec dd if=/dev/zero of=/dev/null bs=512 count=5000";
    let mode = Mode::Buffered { kib_per_cpu: 4 };
    let collected = record(tracefs, mode, script, dir.path());
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

fn futex_calls_come_with_their_address(tracefs: &Tracefs) {
    let dir = tempfile::tempdir().unwrap();
    // xz waits for its threads by futexes.
    let xz = program("xz").unwrap();
    let xz = format!("{} -T2 --block-size=1MiB", xz.display());
    let child = waiting(&format!("head -c 20000000 /dev/zero | {xz}"));
    let options = futex::Options {
        threads: &[child.id()],
        mode: Mode::Live { kib_per_cpu: 1024 },
    };
    let running = futex::start(tracefs, &options).unwrap();
    let_go(child);
    Box::new(running).stop(dir.path()).unwrap();
    let events = events(dir.path(), "futex");
    assert!(events.iter().all(|event| event.args[0] == FUTEX));
    let enters: Vec<_> = events.iter().filter(|e| e.kind == Kind::SysEnter).collect();
    assert!(!enters.is_empty() && enters.iter().all(|event| event.args[1] != 0));
}

fn nothing_is_left_behind_not_even_by_the_killed(tracefs: &Tracefs) {
    let instances = tracefs.root().join("instances");
    let killed = instances.join(format!("fathom_{}_999_killed", std::process::id()));
    std::fs::create_dir(&killed).unwrap();
    let instance = tracefs.instance("test").unwrap();
    let path = instance.path().to_owned();
    instance.enable("sched/sched_switch", None).unwrap();
    instance.on().unwrap();
    // Another run begins, and removes only the folders of runs that have ended.
    let other = Tracefs::open().unwrap();
    // Another run that began at the same time may still be removing the folder.
    until("the end of the killed run's folder", || !killed.exists());
    assert!(path.exists());
    drop(other);
    drop(instance);
    assert!(!path.exists());
}

fn tracing_oneself_is_refused(tracefs: &Tracefs) {
    let options = syscalls::Options {
        threads: &[std::process::id()],
        mode: Mode::Live { kib_per_cpu: 64 },
    };
    let refused = syscalls::start(tracefs, &options).unwrap_err().to_string();
    assert!(refused.contains("tracer's own"), "{refused}");
}
