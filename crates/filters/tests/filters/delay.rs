use crate::support::{Ask, Bed, until};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

#[test]
fn what_is_delayed_together_ends_together() {
    const READS: usize = 100;
    let bed = Bed::new(&["delay:read=200ms"], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..READS as u64).map(|n| Ask::read(n * 4096, 4096)));
    let answers = peer.answers(READS);
    for answer in &answers {
        assert_eq!(answer.error, 0);
        // The stage `queue` contains the whole delay, so it is never shorter, even on a slow
        // machine.
        assert!(answer.queued >= 200 * MS, "{answer:?}");
    }
    // If requests waited one after the other, the wait of the last would be a hundred times the
    // wait of the first.
    let mut waits: Vec<_> = answers.iter().map(|answer| answer.queued).collect();
    waits.sort_unstable();
    assert!(waits[READS - 1] < 20 * waits[0], "{waits:?}");
    // A write does not wait for a read, either.
    peer.ask_all([Ask::read(0, 512), Ask::write(0, vec![1; 512])]);
    let first = peer.answer().number;
    assert_eq!(first, READS as u64 + 1);
}

#[test]
fn thousands_wait_and_the_worker_sleeps() {
    let bed = Bed::new(&["delay:read=100ms,write=200ms,flush=1000s"], 1);
    let sleeps = || bed.workers[0].counters().sleeps.get();
    let mut peer = bed.peer();
    let before = sleeps();
    peer.ask_all((0..4000).map(|n| Ask::read(n % 1000 * 512, 512)));
    peer.ask_all((0..1000).map(|n| Ask::write(n * 512, vec![7; 512])));
    for answer in peer.answers(5000) {
        let delay = if answer.number < 4000 { 100 } else { 200 };
        assert!(answer.queued >= delay * MS, "{answer:?}");
    }
    // Requests popped together are due together, so the worker sleeps once or twice per batch, not
    // once per request or moment.
    let slept = sleeps() - before;
    assert!(slept < 100, "{slept}");
    // While requests wait, the worker sleeps again after each wake-up.
    peer.ask_all((0..5000).map(|_| Ask::flush()));
    peer.popped();
    for _ in 0..3 {
        let before = sleeps();
        bed.workers[0].look().unwrap();
        until("it sleeps", || sleeps() > before);
    }
    until("it stays asleep", || {
        let before = sleeps();
        std::thread::sleep(20 * MS);
        sleeps() == before
    });
    assert!(peer.answer_now().is_none());
    drop(bed.workers[0].detach(peer.id.take().unwrap()));
}

#[test]
fn a_change_is_for_requests_to_come() {
    let bed = Bed::new(&["delay"], 1);
    let mut peer = bed.peer();
    assert!(peer.may_take_less_than(100 * MS, Ask::read(0, 512)));
    bed.set(0, &[("read", "100ms"), ("flush", "1ms")]).unwrap();
    let slow = peer.do_it(Ask::read(0, 512)).took;
    assert!(slow >= 100 * MS, "{slow:?}");
    assert_eq!(bed.filters[0].values()[0], ("read", "100ms".into()));
    // Either all settings change or none.
    let refused = bed.set(0, &[("read", ""), ("write", "soon")]).unwrap_err();
    assert!(
        refused.contains("write") && refused.contains("soon"),
        "{refused}"
    );
    assert_eq!(bed.filters[0].values().len(), 2);
    bed.set(0, &[("read", "")]).unwrap();
    assert!(peer.may_take_less_than(100 * MS, Ask::read(0, 512)));
}

#[test]
fn a_recorded_disk_is_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stats.json");
    let stage = |name, histogram| {
        format!(
            r#"{{"stage":"{name}","count":4,"mean_ns":1,"p50_ns":null,"p90_ns":null,
               "p99_ns":null,"p999_ns":null,"max_ns":1{histogram}}}"#
        )
    };
    let device = stage(
        "device",
        r#","histogram":[[50e6,60e6,3],[3000e6,3001e6,1]]"#,
    );
    let stages = format!("{},{}", stage("wake", ""), device);
    let of = |stages: &str| format!(r#"{{"operations":[{{"op":"read","stages":[{stages}]}}]}}"#);
    std::fs::write(&file, of(&stages)).unwrap();
    let spec = format!("delay:histogram={},flush=5ms", file.display());
    let bed = Bed::new(&[&spec], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..400).map(|_| Ask::read(0, 512)));
    let answers = peer.answers(400);
    // The two delays are far apart, so that a busy machine does not make one look like the other.
    let late = answers.iter().filter(|a| a.queued >= 3000 * MS).count();
    assert!((50..200).contains(&late), "{late}");
    assert!(answers.iter().all(|a| a.queued >= 50 * MS));
    assert!(peer.may_take_less_than(50 * MS, Ask::write(0, vec![0; 512])));
    // A summary of an older fathom has no histogram.
    std::fs::write(&file, of(&stage("device", ""))).unwrap();
    let refused = bed.set(0, &[("seed", "1")]).unwrap_err();
    assert!(refused.contains("fathom stats --json"), "{refused}");
}

#[test]
fn delays_add_up_in_any_order() {
    let (short, long, log) = ("delay:read=50ms", "delay:read=100ms", "log:file=/dev/null");
    for specs in [
        [short, log, long],
        [long, log, short],
        [log, short, long],
        [long, short, log],
    ] {
        let bed = Bed::new(&specs, 1);
        let mut peer = bed.peer();
        let answer = peer.do_it(Ask::read(0, 512));
        // Both delays apply, and all of it is in the stage `queue`.
        assert!(answer.queued >= 150 * MS, "{specs:?}: {answer:?}");
        // Neither delay applies twice.
        let less = peer.may_take_less_than(200 * MS, Ask::read(0, 512));
        assert!(less, "{specs:?}");
    }
}
