use crate::support::{Ask, Bed};
use fathom_core::Clock;
use std::time::{Duration, Instant};

const MS: Duration = Duration::from_millis(1);

#[test]
fn what_is_delayed_together_ends_together() {
    const READS: u32 = 100;
    let bed = Bed::new(&["delay:read=200ms"], 1);
    let mut peer = bed.peer();
    let start = Instant::now();
    peer.ask_all((0..READS).map(|n| Ask::read(u64::from(n) * 4096, 4096)));
    let answers = peer.answers(READS as usize);
    let elapsed = start.elapsed();
    // Far from one after the other, however busy the machine is.
    let most = READS * 200 * MS / 2;
    assert!(elapsed >= 200 * MS && elapsed < most, "{elapsed:?}");
    for answer in answers {
        assert_eq!(answer.error, 0);
        // All of it is in the stage `queue`.
        assert!(answer.queued >= 200 * MS, "{answer:?}");
    }
    // And a write does not wait for a read.
    peer.ask_all([Ask::read(0, 512), Ask::write(0, vec![1; 512])]);
    let first = peer.answer().number;
    assert_eq!(first, u64::from(READS) + 1);
}

#[test]
fn thousands_wait_and_the_worker_sleeps() {
    let bed = Bed::new(&["delay:read=150ms+-10ms,write=300ms"], 1);
    let mut peer = bed.peer();
    let sleeps = bed.workers[0].counters().sleeps.get();
    peer.ask_all((0..4000).map(|n| Ask::read(n % 1000 * 512, 512)));
    peer.ask_all((0..1000).map(|n| Ask::write(n * 512, vec![7; 512])));
    let answers = peer.answers(5000);
    let mean = |first: bool| {
        let of = answers.iter().filter(|a| (a.number < 4000) == first);
        let queued: Vec<_> = of.map(|a| a.queued.as_secs_f64()).collect();
        queued.iter().sum::<f64>() / queued.len() as f64
    };
    let (reads, writes) = (mean(true), mean(false));
    // A busy machine may add to it. (What is drawn is tested where it is drawn.)
    assert!(reads > 0.14 && writes >= 0.3, "{reads} {writes}");
    // At most once for each deadline, not once for each moment.
    let slept = bed.workers[0].counters().sleeps.get() - sleeps;
    assert!(slept < 5000, "{slept}");
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
    // All or nothing.
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
    // Far apart, so that a busy machine does not make one of the other.
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
    let bed = Bed::new(
        &["delay:read=50ms", "log:file=/dev/null", "delay:read=100ms"],
        1,
    );
    let mut peer = bed.peer();
    let answer = peer.do_it(Ask::read(0, 512));
    assert!(answer.queued >= 150 * MS, "{answer:?}");
    let clock = Clock::get();
    assert!(answer.at <= clock.now());
}
