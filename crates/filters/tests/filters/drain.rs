//! Filters do not delay a front-end that detaches a queue.

use crate::support::{Ask, Bed, Peer};
use std::time::{Duration, Instant};

/// Number of reads, and of writes.
const EACH: usize = 64;
/// All requests: reads, writes and a flush.
const ALL: usize = 2 * EACH + 1;

fn ask_for_all(peer: &mut Peer) {
    let offset = |n| n as u64 * 4096;
    peer.ask_all((0..EACH).map(|n| Ask::read(offset(n), 4096)));
    peer.ask_all((0..EACH).map(|n| Ask::write(offset(n), vec![1; 4096])));
    peer.ask(Ask::flush());
}

fn errors(peer: &mut Peer) -> Vec<i32> {
    std::iter::from_fn(|| peer.answer_now())
        .map(|a| a.error)
        .collect()
}

/// Detaches a source that has all these requests in flight behind the filters. Returns the errors
/// of the replies.
fn errors_of_a_drain(specs: &[&str]) -> Vec<i32> {
    let bed = Bed::new(specs, 1);
    bed.filters.iter().for_each(|filter| filter.opened());
    let mut peer = bed.peer();
    ask_for_all(&mut peer);
    peer.popped();
    let start = Instant::now();
    drop(bed.workers[0].detach(peer.id.take().unwrap()));
    let elapsed = start.elapsed();
    // The filters here would hold requests back for at least a minute.
    assert!(elapsed < Duration::from_secs(30), "{specs:?}: {elapsed:?}");
    errors(&mut peer)
}

#[test]
fn delayed_requests_are_submitted() {
    let errors = errors_of_a_drain(&["delay:read=1000s,write=1000s,flush=1000s"]);
    assert_eq!(errors, [0; ALL]);
    // The same holds for requests to a disk that is not open yet.
    assert_eq!(errors_of_a_drain(&["delay:open=1000s"]), [0; ALL]);
}

#[test]
fn throttled_requests_are_submitted() {
    // The flush is not throttled, so it is answered in any case.
    assert_eq!(errors_of_a_drain(&["throttle:bps-total=1"]), [0; ALL]);
    assert_eq!(
        errors_of_a_drain(&["throttle:iops-read=1,iops-write=1"]),
        [0; ALL]
    );
}

#[test]
fn hanging_requests_fail() {
    assert_eq!(errors_of_a_drain(&["fault:hang=yes"]), [libc::EIO; ALL]);
    let errors = errors_of_a_drain(&["fault:hang=yes,op=read"]);
    assert_eq!(errors.iter().filter(|e| **e == libc::EIO).count(), EACH);
    assert_eq!(errors.len(), ALL);
}

#[test]
fn nothing_is_popped_from_a_paused_disk() {
    let bed = Bed::new(&["pause:frozen=yes"], 1);
    let mut peer = bed.peer();
    ask_for_all(&mut peer);
    std::thread::sleep(Duration::from_millis(20));
    drop(bed.workers[0].detach(peer.id.take().unwrap()));
    assert_eq!(errors(&mut peer), [0; 0]);
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
        assert_eq!(errors_of_a_drain(&specs), [0; ALL], "{specs:?}");
    }
}

#[test]
fn sources_that_stay_keep_waiting() {
    let bed = Bed::new(&["delay:read=1000s"], 1);
    let (mut leaves, mut stays) = (bed.peer(), bed.peer());
    leaves.ask(Ask::read(0, 512));
    stays.ask(Ask::read(0, 512));
    leaves.popped();
    stays.popped();
    drop(bed.workers[0].detach(leaves.id.take().unwrap()));
    assert_eq!(leaves.answer().error, 0);
    bed.workers[0].look().unwrap(); // The worker has completed a turn since.
    assert!(stays.answer_now().is_none());
    drop(bed.workers[0].detach(stays.id.take().unwrap()));
    assert_eq!(stays.answer().error, 0);
}
