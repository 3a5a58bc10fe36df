use crate::support::{Ask, Bed};
use fathom_core::Clock;
use std::time::{Duration, Instant};

const MS: Duration = Duration::from_millis(1);

#[test]
fn what_is_delayed_together_ends_together() {
    let bed = Bed::new(&["delay:read=200ms"], 1);
    let mut peer = bed.peer();
    let start = Instant::now();
    peer.ask_all([Ask::read(0, 4096), Ask::read(8192, 4096)]);
    let answers = peer.answers(2);
    let elapsed = start.elapsed();
    assert!(elapsed >= 200 * MS && elapsed < 390 * MS, "{elapsed:?}");
    for answer in answers {
        assert_eq!(answer.error, 0);
        // All of it is in the stage `queue`.
        assert!(answer.queued >= 200 * MS, "{answer:?}");
    }
    assert!(peer.do_it(Ask::write(0, vec![1; 512])).took < 200 * MS);
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
    assert!((0.14..0.2).contains(&reads), "{reads}");
    assert!((0.3..0.4).contains(&writes), "{writes}");
    // At most once for each deadline, not once for each moment.
    let slept = bed.workers[0].counters().sleeps.get() - sleeps;
    assert!(slept < 5000, "{slept}");
}

#[test]
fn a_change_is_for_requests_to_come() {
    let bed = Bed::new(&["delay"], 1);
    let mut peer = bed.peer();
    let quick = peer.do_it(Ask::read(0, 512)).took;
    bed.set(0, &[("read", "100ms"), ("flush", "1ms")]).unwrap();
    let slow = peer.do_it(Ask::read(0, 512)).took;
    assert!(slow >= 100 * MS && quick < slow, "{quick:?} {slow:?}");
    assert_eq!(bed.filters[0].values()[0], ("read", "100ms".into()));
    // All or nothing.
    let refused = bed.set(0, &[("read", ""), ("write", "soon")]).unwrap_err();
    assert!(
        refused.contains("write") && refused.contains("soon"),
        "{refused}"
    );
    assert_eq!(bed.filters[0].values().len(), 2);
    bed.set(0, &[("read", "")]).unwrap();
    assert!(peer.do_it(Ask::read(0, 512)).took < 100 * MS);
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
    let device = stage("device", r#","histogram":[[50e6,60e6,3],[150e6,151e6,1]]"#);
    let stages = format!("{},{}", stage("wake", ""), device);
    let of = |stages: &str| format!(r#"{{"operations":[{{"op":"read","stages":[{stages}]}}]}}"#);
    std::fs::write(&file, of(&stages)).unwrap();
    let spec = format!("delay:histogram={},flush=5ms", file.display());
    let bed = Bed::new(&[&spec], 1);
    let mut peer = bed.peer();
    peer.ask_all((0..400).map(|_| Ask::read(0, 512)));
    let answers = peer.answers(400);
    let late = answers.iter().filter(|a| a.queued >= 150 * MS).count();
    assert!((50..200).contains(&late), "{late}");
    assert!(answers.iter().all(|a| a.queued >= 50 * MS));
    assert!(peer.do_it(Ask::write(0, vec![0; 512])).took < 50 * MS);
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
