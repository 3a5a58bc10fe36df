use super::*;

const IOCTL: u64 = 16;
const IO_SUBMIT: u64 = 209;
const KVM_RUN: u64 = 0xae80;

fn enter(tid: u32, nr: u64, arg1: u64) -> Event {
    Event::new(0, Kind::SysEnter, 0, tid, &[nr, 0, arg1, 0, 0])
}

fn exit(tid: u32, nr: u64) -> Event {
    Event::new(0, Kind::SysExit, 0, tid, &[nr, 0])
}

fn lost() -> Event {
    Event::new(0, Kind::Lost, 0, 0, &[1])
}

fn table(events: &[(i64, Event)]) -> (Vec<ThreadCalls>, Vec<String>) {
    let mut calls = Calls::new();
    events
        .iter()
        .for_each(|(time, event)| calls.add(*time, event));
    calls.finish(&[])
}

#[test]
fn a_thread_is_in_a_call_or_after_it_all_the_time() {
    // The wiki's vCPU: it runs the guest, and submits I/O for it.
    let mut events = Vec::new();
    let mut time = 0;
    for round in 0..100i64 {
        for (nr, arg1, inside, after) in [(IOCTL, KVM_RUN, 200 + round, 4), (IO_SUBMIT, 0, 16, 2)] {
            events.push((time, enter(7, nr, arg1)));
            time += inside;
            events.push((time, exit(7, nr)));
            time += after;
        }
    }
    let (tables, notes) = table(&events);
    assert!(notes.is_empty());
    let [run, submit] = &tables[0].calls[..] else {
        panic!("{tables:?}");
    };
    assert_eq!(
        (run.name.as_str(), submit.name.as_str()),
        ("ioctl(KVM_RUN)", "io_submit")
    );
    assert_eq!(
        (run.time.count, run.time.min, run.time.max),
        (100, 200, 299)
    );
    assert_eq!((run.time.mean, run.total), (249.5, 24_950));
    assert!((run.time.deviation - 29.011_491_975_882_016).abs() < 1e-9);
    assert_eq!((run.post.count, run.post.min, run.post.max), (100, 4, 4));
    // No user-space time follows the last call.
    assert_eq!((submit.post.count, submit.post_total), (99, 198));
    let all = run.total + run.post_total + submit.total + submit.post_total;
    assert_eq!(all, time - 2, "everything up to the last return");
}

#[test]
fn threads_are_told_apart_and_put_in_order() {
    let thread = |tid, role, vcpu| Thread {
        pid: 1,
        tid,
        name: format!("t{tid}"),
        role,
        vcpu,
    };
    let threads = [
        thread(5, Role::Vcpu, Some(1)),
        thread(6, Role::Vcpu, Some(0)),
        thread(7, Role::Io, None),
        thread(8, Role::Main, None),
    ];
    let mut calls = Calls::new();
    for tid in [9, 8, 7, 6, 5] {
        calls.add(0, &enter(tid, 0, 0));
    }
    for tid in [5, 6, 7, 8, 9] {
        calls.add(i64::from(tid), &exit(tid, 0));
    }
    let (tables, _) = calls.finish(&threads);
    let tids: Vec<u32> = tables.iter().map(|table| table.thread.tid).collect();
    assert_eq!(tids, [7, 6, 5, 8, 9]);
    assert_eq!(tables[4].thread.name, "");
    assert!(
        tables
            .iter()
            .all(|t| t.calls[0].total == i64::from(t.thread.tid))
    );
}

#[test]
fn missing_events_make_no_long_calls() {
    let (tables, notes) = table(&[
        // The tracing begins within a call.
        (0, exit(1, 0)),
        (10, enter(1, 0, 0)),
        (20, exit(1, 0)),
        // A return and an entry are missing, and the kernel reports the loss.
        (30, enter(1, 0, 0)),
        (40, lost()),
        (5000, exit(1, 0)),
        (5010, enter(1, 0, 0)),
        (5030, exit(1, 0)),
        // Events are missing without a report.
        (6000, enter(1, 0, 0)),
        (9000, exit(1, IO_SUBMIT)),
        (9100, enter(1, 0, 0)),
        (9200, enter(1, 0, 0)),
        (9230, exit(1, 0)),
        (9300, exit(1, 0)),
        // The tracing ends within a call.
        (9400, enter(1, 0, 0)),
    ]);
    let row = &tables[0].calls[0];
    assert_eq!((row.time.count, row.time.max, row.total), (3, 30, 60));
    assert_eq!((row.post.count, row.post_total), (2, 10 + 970));
    assert!(notes[0].contains("3 entries or returns"), "{notes:?}");
}

#[test]
fn a_flood_of_threads_is_bounded() {
    let mut calls = Calls::new();
    for tid in 0..10_000 {
        calls.add(0, &enter(tid, 0, 0));
        calls.add(1, &exit(tid, 0));
    }
    let (tables, notes) = calls.finish(&[]);
    assert_eq!(tables.len(), MAX_THREADS);
    assert!(notes[0].contains("beyond the first 512"));
}
