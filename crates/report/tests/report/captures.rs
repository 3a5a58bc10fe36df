//! Small real captures, compared with figures that a dozen lines of Python took from the same text.
//!
//! - `dd.events`: the system calls of `dd bs=4k count=30 iflag=direct`, by ftrace, in whole
//!   microseconds;
//! - `locks.events`: the system calls of a program (not position-independent) whose two threads
//!   each take `the_lock`, at 0x404060, 12 times and hold it for 2 ms;
//! - `qemu-threads.events`: QEMU 10.0 serving a guest that reads, aio=threads, 1 us resolution;
//! - `qemu-mutexes.events`: the same for 500 us, with its mutex events.

use std::path::PathBuf;

use fathom_report::analysis::{CallRow, ThreadCalls};
use fathom_report::calls::Calls;
use fathom_report::locks::{Locks, MutexNames};
use fathom_report::qemu::Steps;
use fathom_report::time_lines::TimeLines;
use fathom_run::{Event, Stream};

const READ_TOTAL: i64 = 2_939_000;
const READ_MAX: i64 = 2_314_000;
const READ_POST: i64 = 31_000;
const READ_DEVIATION: f64 = 399_499.526;
/// (thread, waits, total in ns, source)
const THE_LOCK: [(u32, u64, i64, &str); 2] = [
    (29709, 11, 20_569_000, "futex"),
    (29708, 10, 19_293_000, "futex"),
];

fn events(name: &str, take: &mut dyn FnMut(i64, &Event)) -> Vec<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(format!("{name}.events"));
    let mut stream = Stream::open(&path).unwrap();
    while let Some(event) = stream.next_event().unwrap() {
        take(event.time.cast_signed(), &event);
    }
    assert!(!stream.is_cut() && stream.unknown() == 0);
    stream.header().strings.clone()
}

fn table(name: &str) -> Vec<ThreadCalls> {
    let mut calls = Calls::new();
    events(name, &mut |time, event| calls.add(time, event));
    let (tables, _) = calls.finish(&[]);
    tables
}

fn row<'a>(table: &'a ThreadCalls, name: &str) -> &'a CallRow {
    let row = table.calls.iter().find(|row| row.name == name);
    row.unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn the_calls_of_dd_are_counted() {
    let tables = table("dd");
    assert_eq!(tables.len(), 1);
    let read = row(&tables[0], "read");
    assert_eq!(
        (read.time.count, read.total, read.time.max),
        (33, READ_TOTAL, READ_MAX)
    );
    assert_eq!((read.post.count, read.post_total), (33, READ_POST));
    assert!((read.time.deviation - READ_DEVIATION).abs() < 0.001);
    assert_eq!(row(&tables[0], "openat").time.count, 35);
    // 33 reads are enough for a median, and too few for any other percentile.
    assert!(read.time.p50.is_some() && read.time.p90.is_none());
    assert_eq!(tables[0].calls[0].name, "read", "most time first");
}

#[test]
fn the_time_line_of_dd_has_no_gap() {
    let mut lines = TimeLines::first(i64::MAX / 4);
    events("dd", &mut |time, event| {
        lines.add(time, event);
    });
    let lines = lines.finish(&[]);
    let spans = &lines[0].spans;
    assert!(spans.windows(2).all(|pair| pair[0].1 == pair[1].0));
    let reading = spans.iter().filter(|(_, _, what)| what == "read");
    let total: i64 = reading.map(|(from, to, _)| to - from).sum();
    assert_eq!(total, READ_TOTAL);
}

#[test]
fn two_threads_that_fight_for_a_lock_are_seen_waiting_for_it() {
    let mut locks = Locks::new();
    events("locks", &mut |time, event| locks.add_call(time, event));
    let name = |_, address| (address == 0x40_4060).then(|| "the_lock".to_owned());
    let (rows, notes) = locks.finish(&[], &[], &name);
    assert!(notes.is_empty());
    let rows = rows
        .iter()
        .filter(|row| row.name.as_deref() == Some("the_lock"));
    let rows: Vec<_> = rows
        .map(|r| (r.thread.tid, r.time.count, r.total, r.source))
        .collect();
    assert_eq!(rows, THE_LOCK);
}

#[test]
fn qemus_steps_are_those_of_its_log() {
    let mut taken = Vec::new();
    let strings = events("qemu-threads", &mut |time, event| {
        taken.push((time, *event))
    });
    let mut steps = Steps::new(&strings);
    taken
        .iter()
        .for_each(|(time, event)| steps.add(*time, event));
    let (rows, notes) = steps.finish(Some((10, 0)));
    assert!(notes.is_empty(), "{notes:?}");
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let us = (row.time.mean * row.time.count as f64 / 1e3).round();
            (row.today.as_str(), row.time.count, us, row.time.max / 1000)
        })
        .collect();
    assert_eq!(
        rows,
        [
            ("virtio_queue_notify", 9, 2903.0, 1333),
            ("thread_pool_submit_aio", 9, 174.0, 25),
            ("return of ppoll()", 0, 0.0, 0),
            ("thread_pool_complete_aio", 9, 517.0, 89),
            ("virtio_blk_rw_complete", 9, 88.0, 21),
            ("virtio_notify_irqfd", 9, 41.0, 6),
        ]
    );
}

#[test]
fn qemus_mutexes_are_named_by_who_takes_them() {
    let mut taken = Vec::new();
    let strings = events("qemu-mutexes", &mut |time, event| {
        taken.push((time, *event))
    });
    let names = MutexNames::of(&strings);
    let mut locks = Locks::new();
    for (time, event) in &taken {
        locks.add_qemu(*time, event, names);
    }
    let (rows, notes) = locks.finish(&[], &strings, &|_, _| None);
    assert!(notes.is_empty());
    let first = &rows[0];
    assert_eq!((first.thread.tid, first.address), (1809, 0x5569_f2e3_22c0));
    assert_eq!((first.time.count, first.total), (7, 8000));
    assert_eq!(rows.len(), 12);
    let pool: Vec<_> = rows
        .iter()
        .filter(|row| row.address == 0x7fe5_1400_33f0)
        .collect();
    let named = |name: &str| name.starts_with("util/thread-pool.c:");
    assert!(
        pool.iter()
            .all(|row| row.name.as_deref().is_some_and(named))
    );
    assert_eq!(pool.len(), 2);
}
