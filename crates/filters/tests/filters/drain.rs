//! A front-end that takes a queue away waits for nothing.

use crate::support::{Ask, Bed};
use std::time::{Duration, Instant};

/// Detaches a source that has eight reads and as many writes with this
/// filter, and returns the errors of those that were answered.
fn errors_of_a_drain(specs: &[&str]) -> Vec<i32> {
    let bed = Bed::new(specs, 1);
    bed.filters.iter().for_each(|filter| filter.opened());
    let mut peer = bed.peer();
    peer.ask_all((0..8).map(|n| Ask::read(n * 4096, 4096)));
    peer.ask_all((0..8).map(|n| Ask::write(n * 4096, vec![1; 4096])));
    peer.ask(Ask::flush());
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    drop(bed.workers[0].detach(peer.id.take().unwrap()));
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(5), "{specs:?}: {elapsed:?}");
    std::iter::from_fn(|| peer.answer_now())
        .map(|a| a.error)
        .collect()
}

#[test]
fn delayed_requests_are_submitted() {
    let errors = errors_of_a_drain(&["delay:read=1000s,write=1000s,flush=1000s"]);
    assert_eq!(errors, [0; 17]);
    // So are those of a disk that is not open yet.
    assert_eq!(errors_of_a_drain(&["delay:open=1000s"]), [0; 17]);
}

#[test]
fn throttled_requests_are_submitted() {
    // The flush is not throttled, so it is answered in any case.
    assert_eq!(errors_of_a_drain(&["throttle:bps-total=1"]), [0; 17]);
    assert_eq!(
        errors_of_a_drain(&["throttle:iops-read=1,iops-write=1"]),
        [0; 17]
    );
}

#[test]
fn hanging_requests_fail() {
    assert_eq!(errors_of_a_drain(&["fault:hang=yes"]), [libc::EIO; 17]);
    let errors = errors_of_a_drain(&["fault:hang=yes,op=read"]);
    assert_eq!(errors.iter().filter(|e| **e == libc::EIO).count(), 8);
    assert_eq!(errors.len(), 17);
}

#[test]
fn nothing_is_popped_from_a_paused_disk() {
    assert_eq!(errors_of_a_drain(&["pause:frozen=yes"]), [0; 0]);
}

#[test]
fn whatever_is_stacked_is_drained_through_all_of_it() {
    let slow = "delay:read=1000s,write=1000s,flush=1000s";
    for specs in [
        [slow, "throttle:iops-total=1", slow, "fault:writes=lost"],
        ["throttle:iops-total=1", slow, "fault:writes=lost", slow],
        [
            "readahead:after=0",
            slow,
            "throttle:bps-total=1",
            "log:file=/dev/null",
        ],
        [
            "fault:writes=torn",
            "throttle:iops-total=1",
            slow,
            "readahead",
        ],
    ] {
        assert_eq!(errors_of_a_drain(&specs), [0; 17], "{specs:?}");
    }
}

#[test]
fn sources_that_stay_keep_waiting() {
    let bed = Bed::new(&["delay:read=300ms"], 1);
    let (mut leaves, mut stays) = (bed.peer(), bed.peer());
    leaves.ask(Ask::read(0, 512));
    stays.ask(Ask::read(0, 512));
    std::thread::sleep(Duration::from_millis(20));
    drop(bed.workers[0].detach(leaves.id.take().unwrap()));
    assert!(leaves.answer().took < Duration::from_millis(290));
    assert!(stays.answer().took >= Duration::from_millis(300));
}
