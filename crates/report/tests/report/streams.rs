//! Analyses run directories with any contents: the analysis ends, its memory is bounded, and the
//! times that it reports do not exceed the real time.

use fathom_report::calls::Calls;
use fathom_report::locks::{Locks, MutexNames};
use fathom_report::qemu::Steps;
use fathom_report::time_lines::TimeLines;
use fathom_run::{Event, Kind};
use proptest::prelude::*;

const NAMES: [&str; 9] = [
    "virtio_queue_notify",
    "virtio_blk_handle_read",
    "thread_pool_submit",
    "thread_pool_complete",
    "virtio_blk_rw_complete",
    "virtio_notify",
    "qemu_mutex_lock",
    "qemu_mutex_locked",
    "a.c",
];

/// Generates events that often refer to each other: few threads, calls and addresses.
fn event() -> impl Strategy<Value = Event> {
    let kind = prop_oneof![
        4 => Just(Kind::SysEnter),
        4 => Just(Kind::SysExit),
        8 => Just(Kind::Qemu),
        1 => Just(Kind::Lost),
        1 => Just(Kind::Injected),
    ];
    let number = prop_oneof![
        8 => 0u64..10,
        2 => Just(202u64),
        1 => any::<u64>(),
    ];
    (kind, 0u32..4, proptest::collection::vec(number, 6)).prop_map(|(kind, tid, args)| {
        let args = &args[..kind.args().len().min(6)];
        Event::new(0, kind, 0, tid, args)
    })
}

fn stream() -> impl Strategy<Value = Vec<(i64, Event)>> {
    let gap = prop_oneof![20 => 0i64..1000, 1 => Just(i64::MAX / 64)];
    proptest::collection::vec((gap, event()), 0..400).prop_map(|events| {
        let mut time = i64::MIN / 2;
        let later = |(gap, event): (i64, Event)| {
            time = time.saturating_add(gap);
            (time, event)
        };
        events.into_iter().map(later).collect()
    })
}

fn strings() -> Vec<String> {
    NAMES.iter().map(|name| (*name).to_owned()).collect()
}

proptest! {
    #[test]
    fn calls_take_no_more_time_than_there_was(stream in stream()) {
        let mut calls = Calls::new();
        stream.iter().for_each(|(time, event)| calls.add(*time, event));
        let span = stream.last().map_or(0, |last| last.0.saturating_sub(stream[0].0));
        for table in calls.finish(&[]).0 {
            let each = table.calls.iter().flat_map(|row| [row.total, row.post_total]);
            let sum: i128 = each.map(i128::from).sum();
            prop_assert!(sum <= i128::from(span), "{}", table.thread.tid);
            for row in &table.calls {
                prop_assert!(row.time.min >= 0 && row.post.min >= 0);
            }
        }
    }

    #[test]
    fn waits_and_steps_are_within_the_stream(stream in stream()) {
        let strings = strings();
        let names = MutexNames::of(&strings);
        let (mut locks, mut steps) = (Locks::new(), Steps::new(&strings));
        for (time, event) in &stream {
            locks.add_call(*time, event);
            locks.add_qemu(*time, event, names);
            steps.add(*time, event);
        }
        let span = stream.last().map_or(0, |last| last.0.saturating_sub(stream[0].0));
        for row in locks.finish(&[], &strings, &|_, _| None).0 {
            prop_assert!(row.time.min >= 0 && row.total <= span);
        }
        for step in steps.finish(None).0 {
            prop_assert!(step.time.min >= 0 && step.time.max <= span);
        }
    }

    #[test]
    fn spans_of_a_line_follow_one_another(stream in stream(), length in 0i64..100_000) {
        let mut lines = TimeLines::first(length);
        for (time, event) in &stream {
            if !lines.add(*time, event) {
                break;
            }
        }
        for line in lines.finish(&[]) {
            prop_assert!(line.spans.iter().all(|(from, to, _)| 0 <= *from && from < to));
            prop_assert!(line.spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(line.spans.last().is_none_or(|(_, to, _)| *to <= length));
        }
    }
}
