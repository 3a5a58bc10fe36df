use fathom_run::{Clocks, Environment, Pair, Role, RunKind, StreamWriter, Thread, VERSION};

use super::*;

struct Folder {
    dir: tempfile::TempDir,
    run: Run,
}

fn thread(tid: u32, role: Role) -> Thread {
    Thread {
        pid: 50,
        tid,
        name: format!("t{tid}"),
        role,
        vcpu: None,
    }
}

fn folder() -> Folder {
    Folder {
        dir: tempfile::tempdir().unwrap(),
        run: Run {
            version: VERSION,
            kind: RunKind::Lab,
            title: String::new(),
            created: 0,
            experiment: None,
            scenario: None,
            environment: Environment {
                qemu: Some("QEMU emulator version 10.0.2 (Debian 1:10.0.2)".into()),
                ..Environment::default()
            },
            disks: Vec::new(),
            threads: vec![thread(1, Role::Vcpu), thread(2, Role::Io)],
            rounds: Vec::new(),
            problems: Vec::new(),
        },
    }
}

impl Folder {
    /// Adds a round with a TSC of 2 GHz.
    fn round(&mut self, name: &str) -> &mut Folder {
        std::fs::create_dir(self.dir.path().join(name)).unwrap();
        let pair = |tsc| Pair {
            tsc,
            monotonic_ns: tsc / 2,
        };
        self.run.rounds.push(Round {
            name: name.into(),
            clocks: Clocks {
                host: vec![pair(0), pair(2_000_000_000)],
                realtime_minus_monotonic_ns: 1000,
                ..Clocks::default()
            },
            ..Round::default()
        });
        self
    }

    fn stream(&mut self, name: &str, clock: Clock, strings: &[&str], events: &[Event]) {
        let round = self.run.rounds.last_mut().unwrap();
        let path = self
            .dir
            .path()
            .join(&round.name)
            .join(format!("{name}.events"));
        let strings = strings.iter().map(|s| (*s).to_owned()).collect();
        let mut writer = StreamWriter::create(&path, 7, strings).unwrap();
        events.iter().for_each(|event| writer.push(event).unwrap());
        round.streams.push(StreamInfo {
            name: name.into(),
            clock,
            events: writer.finish().unwrap(),
            lost: Some(0),
        });
    }

    fn threads(&self) -> Threads {
        threads(self.dir.path(), &self.run)
    }
}

fn enter(time: u64, tid: u32, nr: u64, args: [u64; 2]) -> Event {
    Event::new(time, Kind::SysEnter, 0, tid, &[nr, args[0], args[1], 0, 0])
}

fn exit(time: u64, tid: u32, nr: u64) -> Event {
    Event::new(time, Kind::SysExit, 0, tid, &[nr, 0])
}

/// Both threads read for 100 ticks, and one waits for a lock.
fn calls(start: u64) -> Vec<Event> {
    vec![
        enter(start, 1, 0, [0, 0]),
        enter(start + 10, 2, 0, [0, 0]),
        exit(start + 100, 1, 0),
        exit(start + 110, 2, 0),
        enter(start + 200, 2, 202, [0x5500, 128]),
        exit(start + 600, 2, 202),
    ]
}

#[test]
fn all_rounds_are_counted_and_their_ticks_are_ns() {
    let mut folder = folder();
    folder
        .round("a")
        .stream("syscalls", Clock::HostTsc, &[], &calls(1000));
    folder.stream(
        "symbols",
        Clock::HostMonotonic,
        &["the_lock (program)"],
        &[Event::new(0, Kind::Symbol, 0, 0, &[50, 0x5500, 0])],
    );
    folder
        .round("b")
        .stream("syscalls", Clock::HostTsc, &[], &calls(900_000));
    folder
        .round("c")
        .stream("futex", Clock::HostTsc, &[], &calls(0)[4..]);
    // Calls of the guest, and of rounds on the host itself, are not the server's.
    folder
        .round("d")
        .stream("syscalls", Clock::GuestTsc, &[], &calls(0));
    folder
        .round("e")
        .stream("syscalls", Clock::HostTsc, &[], &calls(0));
    folder.run.rounds[4].on_host = true;
    let found = folder.threads();
    assert_eq!(found.problems, Vec::<String>::new());

    let tids: Vec<u32> = found.calls.iter().map(|table| table.thread.tid).collect();
    assert_eq!(tids, [2, 1], "the I/O thread first");
    let row = |thread: usize, name: &str| {
        let rows = &found.calls[thread].calls;
        rows.iter().find(|row| row.name == name).unwrap().clone()
    };
    assert_eq!((row(0, "read").time.count, row(0, "read").total), (2, 100));
    assert_eq!(
        (row(0, "read").post.count, row(0, "read").post_total),
        (2, 90)
    );
    assert_eq!(row(0, "futex(WAIT)").total, 400);
    // No user-space time from one round to the next.
    assert_eq!(row(1, "read").post.count, 0);

    let [lock] = &found.locks[..] else {
        panic!("{:?}", found.locks);
    };
    assert_eq!(lock.name.as_deref(), Some("the_lock (program)"));
    assert_eq!((lock.time.count, lock.total, lock.thread.pid), (3, 600, 50));
    assert!(!found.time_lines.is_empty() && found.qemu.is_empty());
}

/// 400 reads of 10 us each, one every 100 us; the slowest of the benchmark's operations is known.
#[test]
fn the_picture_is_of_the_slowest_request() {
    let ticks = |us: u64| us * 2000;
    let reads: Vec<Event> = (0..400)
        .flat_map(|i| {
            let at = 100 * i;
            [enter(ticks(at), 2, 0, [0, 0]), exit(ticks(at + 10), 2, 0)]
        })
        .collect();
    // Operations in ticks of the guest's TSC, with KVM's offset.
    const OFFSET: u64 = 1_000_000;
    let operation = |i: u64| {
        let (start, length) = (100 * i, if i == 77 { 400 } else { 20 });
        let end = ticks(start + length) + OFFSET;
        let args = [end, 4096 * i, 4096, 4096, 0];
        Event::new(ticks(start) + OFFSET, Kind::BenchOperation, 0, 0, &args)
    };
    let bench: Vec<Event> = (0..300).map(operation).collect();
    let mut folder = folder();
    folder
        .round("a")
        .stream("syscalls", Clock::HostTsc, &[], &reads);
    folder.stream("bench", Clock::GuestTsc, &[], &bench);
    let found = folder.threads();
    let picture = found.picture.unwrap();
    let why = picture.why_not.unwrap();
    assert!(why.contains("clock was not related"), "{why}");
    assert_eq!((picture.length, picture.request), (10_000_000, None));
    // From the middle: the 200th read.
    assert_eq!(found.time_lines[0].spans[0], (0, 10_000, "read".into()));

    let offset = OFFSET.cast_signed();
    folder.run.rounds[0].clocks.guest_offset = Some(fathom_run::GuestOffset {
        before: offset,
        after: offset,
        ratio: None,
        frac_bits: 0,
    });
    let found = folder.threads();
    let request = found.picture.unwrap().request.unwrap();
    assert_eq!((request.number, request.offset), (77, 77 * 4096));
    assert_eq!((request.start, request.total), (4_800_000, 400_000));
    // The read that started with the request lies where the request begins.
    let spans = &found.time_lines[0].spans;
    assert!(spans.contains(&(4_800_000, 4_810_000, "read".into())));

    // A device so fast that the usual window has too many calls: only the request is shown.
    let reads: Vec<Event> = (0..40_000)
        .flat_map(|i| [enter(2000 * i, 2, 0, [0, 0]), exit(2000 * i + 900, 2, 0)])
        .collect();
    folder.run.rounds.clear();
    std::fs::remove_dir_all(folder.dir.path().join("a")).unwrap();
    folder
        .round("a")
        .stream("syscalls", Clock::HostTsc, &[], &reads);
    folder.stream("bench", Clock::GuestTsc, &[], &bench);
    folder.run.rounds[0].clocks.guest_offset = Some(fathom_run::GuestOffset {
        before: offset,
        after: offset,
        ratio: None,
        frac_bits: 0,
    });
    let picture = folder.threads().picture.unwrap();
    let request = picture.request.unwrap();
    assert_eq!((picture.length, request.start), (500_000, 50_000));
}

#[test]
fn qemus_events_become_steps_and_locks() {
    let names = [
        "virtio_queue_notify",
        "virtio_blk_handle_read",
        "virtio_blk_rw_complete",
        "virtio_notify_irqfd",
        "qemu_mutex_lock",
        "qemu_mutex_locked",
        "a.c",
    ];
    let event = |time, args: &[u64]| Event::new(time, Kind::Qemu, 0, 2, args);
    let mut folder = folder();
    let events = [
        event(5000, &[0, 7, 0, 1]),
        event(5010, &[1, 7, 8, 0, 8]),
        event(5020, &[4, 0xaa, 12, 6]),
        event(5050, &[5, 0xaa, 12, 6]),
        event(5400, &[2, 7, 8, 0]),
        event(5450, &[3, 7, 1]),
    ];
    folder
        .round("a")
        .stream("qemu", Clock::HostRealtime, &names, &events);
    let found = folder.threads();
    assert_eq!(found.problems, Vec::<String>::new());
    let steps: Vec<_> = found
        .qemu
        .iter()
        .map(|s| (s.today.as_str(), s.time.max))
        .collect();
    assert_eq!(steps[1], ("io_submit()", 0));
    assert_eq!(steps[4], ("virtio_blk_rw_complete", 400));
    assert_eq!(steps[5], ("virtio_notify_irqfd", 50));
    let [lock] = &found.locks[..] else {
        panic!("{:?}", found.locks);
    };
    assert_eq!((lock.name.as_deref(), lock.total), (Some("a.c:12"), 30));
}

#[test]
fn a_futex_is_named_by_its_symbol_and_by_who_takes_it() {
    let symbols = HashMap::from([
        ((50, 1), "a".to_owned()),
        ((51, 2), "b".to_owned()),
        ((50, 2), "c".to_owned()),
    ]);
    let place = "x.c:1".to_owned();
    for (pid, address, mutex, name) in [
        (50, 1, Some(&place), Some("a, taken at x.c:1")),
        (51, 2, None, Some("b")),
        (51, 9, Some(&place), Some("taken at x.c:1")),
        // A thread of an unknown process: named only if the address is unambiguous.
        (0, 1, Some(&place), Some("a, taken at x.c:1")),
        (0, 2, None, None),
        (50, 3, None, None),
    ] {
        let found = lock_name(&symbols, mutex, pid, address);
        assert_eq!(found.as_deref(), name, "{pid} {address}");
    }
}

#[test]
fn damage_is_said_and_what_came_before_it_stays() {
    let mut folder = folder();
    folder
        .round("a")
        .stream("syscalls", Clock::HostTsc, &[], &calls(1000));
    folder.run.rounds[0].streams[0].lost = Some(7);
    let path = folder.dir.path().join("a/syscalls.events");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 80]).unwrap();
    let found = folder.threads();
    assert!(
        found.problems[0].contains("ends after 4 of 6 events"),
        "{:?}",
        found.problems
    );
    assert!(found.problems[1].contains("7 events were dropped"));
    assert_eq!(found.problems.len(), 2, "said once");
    assert_eq!(found.calls[0].calls[0].time.count, 1);
    folder.run.rounds[0].clocks.host.clear();
    let found = folder.threads();
    assert!(found.calls.is_empty() && found.problems[0].contains("no two readings"));
    folder.run.rounds[0].streams[0].clock = Clock::HostMonotonic;
    std::fs::write(&path, "nonsense").unwrap();
    let found = folder.threads();
    assert!(found.calls.is_empty() && found.problems[0].contains("a: syscalls: "));
}

#[test]
fn versions_are_found_in_what_qemu_prints() {
    assert_eq!(
        version("QEMU emulator version 10.0.2 (Debian 1:10.0.2)"),
        Some((10, 0))
    );
    assert_eq!(version("7.2.15"), Some((7, 2)));
    assert_eq!(version("9.1"), Some((9, 1)));
    assert_eq!(version("unknown"), None);
}
