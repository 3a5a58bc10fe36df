//! Requirements for every worker, whether it has its own thread or is in a pool.

mod holding;

use crate::support::{Peer, TestSource};
use crate::{spawn, spawn_on, until};
use fathom_core::testing::{PollEngine, SIZE, TestDisk};
use fathom_core::{Changes, Disk, Eventfd, Polling, Stage, Unresponsive, WorkerHandle};
use fathom_testing::PATIENCE;
use fathom_trace::{Clock, RingFile, RingReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Waits until the worker has slept for `time`. On a busy machine, it may take long to fall asleep.
fn until_it_sleeps_for(time: Duration, worker: &WorkerHandle) {
    let sleeps = || worker.counters().sleeps.get();
    // A worker that never sleeps has a constant count, too, so the worker must first fall asleep
    // anew.
    let before = sleeps();
    worker.look().unwrap();
    until("it goes to sleep", || sleeps() > before);
    until("it stays asleep", || {
        let before = sleeps();
        std::thread::sleep(time);
        sleeps() == before
    });
}

/// Starts a worker of the kind that this module tests.
fn worker(disk: &Arc<TestDisk>, polling: Polling) -> WorkerHandle {
    let disk: Arc<dyn Disk> = disk.clone();
    spawn(module_path!(), &disk, polling)
}

fn holding() -> Arc<TestDisk> {
    let disk = TestDisk::new();
    disk.hold();
    disk
}

fn held(disk: &TestDisk) -> usize {
    disk.held.load(Ordering::SeqCst)
}

#[test]
fn kick_eventfd_is_replaced_while_requests_are_in_flight() {
    let disk = holding();
    let worker = worker(&disk, Polling::Off);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 8)).unwrap();
    peer.offer(3);
    until("three requests are in flight", || held(&disk) == 3);
    for offered in 4..=6 {
        let kick = peer.replace_kick();
        // No kick arrives for the first request; the worker must check for it by itself.
        if offered == 4 {
            peer.offer(1);
        }
        let replaced = worker.set_eventfd(id, Eventfd::Kick, Some(kick));
        replaced.unwrap().unwrap();
        if offered > 4 {
            until_it_sleeps_for(Duration::from_millis(1), &worker);
            peer.offer(1);
        }
        until("the next is in flight", || held(&disk) == offered);
    }
    assert_eq!(peer.answered(), 0);
    disk.release();
    until("all are answered", || peer.answered() == 6);
    worker.detach(id);
}

#[test]
fn every_request_is_answered_once_and_kicks_are_never_lost() {
    for polling in [
        Polling::Off,
        Polling::Auto,
        Polling::Fixed(Duration::from_micros(20)),
    ] {
        let disk = TestDisk::new();
        let worker = worker(&disk, polling);
        let peer = Peer::new();
        let id = worker.attach(TestSource::boxed(&peer, 8)).unwrap();
        // Sends one request at a time, with pauses of different lengths, so that the worker is
        // found spinning, arming and asleep.
        for round in 0..2_000u64 {
            peer.offer(1);
            until("the request is answered", || peer.answered() == round + 1);
            if round % 100 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        worker.detach(id);
        assert_eq!(peer.answered(), 2_000, "{polling:?}");
        assert_eq!(peer.popped(), 2_000, "{polling:?}");
    }
}

#[test]
fn an_idle_worker_sleeps() {
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Auto);
    let peer = Peer::new();
    worker.attach(TestSource::boxed(&peer, 8)).unwrap();
    for round in 0..100 {
        peer.offer(1);
        until("the request is answered", || peer.answered() == round + 1);
    }
    until_it_sleeps_for(Duration::from_millis(200), &worker);
}

/// A kernel flag may stay set.
#[test]
fn worker_sleeps_when_its_engine_reports_no_completion() {
    for polling in [Polling::Auto, Polling::Fixed(Duration::from_micros(20))] {
        let disk: Arc<dyn Disk> = TestDisk::new();
        let worker = spawn_on(module_path!(), &disk, polling, PollEngine::insisting);
        let peer = Peer::new();
        worker.attach(TestSource::boxed(&peer, 8)).unwrap();
        for round in 0..1000 {
            peer.offer(1);
            until("the request is answered", || peer.answered() == round + 1);
        }
        until_it_sleeps_for(Duration::from_millis(200), &worker);
    }
}

#[test]
fn time_that_is_spent_polling_is_counted() {
    for (polling, polls) in [
        (Polling::Off, false),
        (Polling::Fixed(Duration::from_micros(20)), true),
    ] {
        let begin = Clock::get().now();
        let disk = TestDisk::new();
        let worker = worker(&disk, polling);
        let counters = worker.counters();
        until("it sleeps", || counters.sleeps.get() > 0);
        let polled_ns = counters.polled_ns.get();
        assert_eq!(polled_ns > 0, polls, "{polling:?}");
        let all = Clock::get().now() - begin;
        assert!(polled_ns < Clock::get().ns(all), "{polling:?}");
    }
}

#[test]
fn a_detach_waits_for_what_is_in_flight_and_pops_nothing_more() {
    let disk = holding();
    let worker = worker(&disk, Polling::Off);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
    peer.offer(3);
    until("all are with the disk", || held(&disk) == 3);
    let detaching = worker.begin_detach(id);
    worker.look().unwrap(); // Returns when the worker has also read the detach.
    peer.offer(1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((peer.popped(), peer.answered()), (3, 0));
    disk.release();
    drop(detaching.wait());
    assert_eq!((peer.popped(), peer.answered()), (3, 3));
}

#[test]
fn requests_of_a_source_detached_at_once_are_served() {
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Off);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Other commands keep the mailbox from ever being empty, so that the detach arrives while
        // the worker is still reading it.
        scope.spawn(|| {
            for _ in 0..200_000 {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                worker.trace(None);
            }
        });
        for _ in 0..20 {
            let peer = Peer::new();
            peer.offer(3);
            let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
            worker.detach(id);
            let served = (peer.popped(), peer.answered());
            if served != (3, 3) {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(served, (3, 3));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn kick_during_a_completion_wakes_the_worker() {
    for polling in [Polling::Off, Polling::Auto] {
        let disk = holding();
        let worker = worker(&disk, polling);
        let peer = Peer::new();
        let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
        peer.offer(1);
        until("it is with the disk", || held(&disk) == 1);
        // The worker is asleep and armed by now; the completion wakes it.
        std::thread::sleep(Duration::from_millis(20));
        peer.echo(100);
        disk.release();
        until("the echoes are answered", || peer.answered() == 101);
        worker.detach(id);
    }
}

#[test]
fn a_source_never_has_more_in_flight_than_it_attached_with() {
    for polling in [Polling::Off, Polling::Fixed(Duration::from_micros(20))] {
        let disk = holding();
        let worker = worker(&disk, polling);
        let peer = Peer::new();
        let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
        peer.offer(10);
        until("four are with the disk", || held(&disk) == 4);
        // The remaining requests are no reason to stay awake.
        until_it_sleeps_for(Duration::from_millis(20), &worker);
        assert_eq!(peer.popped(), 4);
        disk.release();
        until("all are answered", || peer.answered() == 10);
        worker.detach(id);
    }
}

#[test]
fn sources_come_and_go_beside_each_other() {
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Auto);
    let stays = Peer::new();
    worker.attach(TestSource::boxed(&stays, 2)).unwrap();
    for round in 0..50u64 {
        let peer = Peer::new();
        let id = worker.attach(TestSource::boxed(&peer, 16)).unwrap();
        peer.offer(20);
        stays.offer(1);
        until("both are answered", || {
            peer.answered() == 20 && stays.answered() == round + 1
        });
        worker.detach(id);
        peer.offer(1);
        assert_eq!(peer.answered(), 20);
    }
}

#[test]
fn peer_that_breaks_the_protocol_can_be_detached() {
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Auto);
    let (bad, good) = (Peer::new(), Peer::new());
    let id = worker.attach(TestSource::boxed(&bad, 4)).unwrap();
    worker.attach(TestSource::boxed(&good, 4)).unwrap();
    bad.break_protocol();
    bad.offer(1);
    good.offer(5);
    until("the other is answered", || good.answered() == 5);
    until("what it had answered before is published", || {
        bad.answered() == 1
    });
    // Further requests of the bad peer are ignored.
    bad.offer(1);
    good.offer(1);
    until("the other is answered again", || good.answered() == 6);
    worker.detach(id);
    assert_eq!((bad.answered(), worker.counters().refused.get()), (1, 1));
}

#[test]
fn one_batch_is_published_and_notified_once() {
    let disk = holding();
    let worker = worker(&disk, Polling::Off);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 64)).unwrap();
    peer.offer(64);
    until("all are with the disk", || held(&disk) == 64);
    disk.release();
    until("all are answered", || peer.answered() == 64);
    worker.detach(id);
    assert_eq!((peer.published(), peer.notified()), (1, 1));
}

#[test]
fn stage_times_add_up_and_the_device_is_charged_with_its_own() {
    let start = Instant::now();
    let disk = holding();
    let worker = worker(&disk, Polling::Off);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
    peer.offer(1);
    until("it is with the disk", || held(&disk) == 1);
    std::thread::sleep(Duration::from_millis(50));
    disk.release();
    until("it is answered", || peer.answered() == 1);
    worker.detach(id);
    let real = start.elapsed().as_nanos() as f64;
    let stages = worker.histograms().counts(fathom_core::Op::Read);
    let sum: u64 = stages[..Stage::COUNT].iter().map(|s| s.sum()).sum();
    assert_eq!(stages[Stage::COUNT].sum(), sum);
    assert_eq!(stages[Stage::COUNT].count(), 1);
    let device = fathom_core::Clock::get().ns(stages[Stage::Device as usize].sum());
    assert!(device >= 49_000_000, "{device}");
    // No other stage is charged with the same time; the clocks differ a little.
    let sum = fathom_core::Clock::get().ns(sum) as f64;
    assert!(sum < 1.02 * real, "{sum} of {real}");
}

#[test]
fn what_was_answered_before_a_trace_ends_is_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut file = RingFile::create(&path, "test", 1, 16).unwrap();
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Off);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
    worker.trace(Some(file.writer(0)));
    worker.look().unwrap();
    peer.be_slow(true);
    peer.offer(1);
    until("the peer has its answer", || peer.answered() == 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            peer.be_slow(false);
        });
        worker.trace(None);
        worker.look().unwrap();
    });
    let mut entries = Vec::new();
    RingReader::open(&path).unwrap().poll(&mut entries).unwrap();
    assert_eq!(entries.len(), 1);
    worker.detach(id);
}

#[test]
fn who_asks_a_worker_that_is_stuck_gets_an_answer() {
    let worker = worker(&holding(), Polling::Off);
    let (stuck, refused) = (Peer::new(), Peer::new());
    let id = worker.attach(TestSource::boxed(&stuck, 4)).unwrap();
    stuck.be_slow(true);
    stuck.break_protocol(); // gets a reply, slowly
    stuck.offer(1);
    until("it is stuck", || stuck.published() > 0);
    let ask = || {
        let start = Instant::now();
        assert_eq!(worker.look(), Err(Unresponsive));
        start.elapsed()
    };
    let patience = ask();
    let error = worker.attach(TestSource::boxed(&refused, 4)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    // Once the worker is known to be stuck, callers do not wait any more.
    assert!(ask() < patience / 2);
    assert!(!worker.wait_until_stopped(Instant::now()));
    stuck.be_slow(false);
    until("it looks again", || worker.look() == Ok(()));
    refused.offer(1);
    worker.detach(id);
    let id = worker.attach(TestSource::boxed(&Peer::new(), 4)).unwrap();
    worker.detach(id);
    assert_eq!(refused.popped(), 0);
    worker.stop();
    assert!(worker.wait_until_stopped(Instant::now() + PATIENCE));
}

/// A sender that has timed out must not leave an attached source behind.
#[test]
fn a_source_that_was_given_up_is_dropped() {
    let worker = worker(&holding(), Polling::Off);
    let (stuck, refused) = (Peer::new(), Peer::new());
    worker.attach(TestSource::boxed(&stuck, 4)).unwrap();
    stuck.be_slow(true);
    stuck.break_protocol();
    stuck.offer(1);
    until("it is stuck", || stuck.published() > 0);
    refused.offer(1);
    worker.attach(TestSource::boxed(&refused, 4)).unwrap_err();
    stuck.be_slow(false);
    until("it looks again", || worker.look() == Ok(()));
    worker.look().unwrap();
    assert_eq!(refused.popped(), 0);
    assert_eq!(Arc::strong_count(&refused), 1);
}

#[test]
fn what_is_written_is_noted_before_its_source_is_given_back() {
    let disk = TestDisk::new();
    let worker = worker(&disk, Polling::Off);
    let changes = Arc::new(Changes::new(SIZE));
    let taken = || {
        let runs = changes.take(0..SIZE, usize::MAX).into_iter();
        runs.filter(|run| run.changed).count()
    };
    for (noting, expected) in [
        (None, 0),
        (Some(changes.clone()), 1),
        (Some(changes.clone()), 1),
        (None, 0),
    ] {
        worker.note_changes(noting);
        let peer = Peer::new();
        peer.write_zeroes();
        let id = worker.attach(TestSource::boxed(&peer, 4)).unwrap();
        peer.offer(1);
        until("it is answered", || peer.answered() == 1);
        worker.detach(id);
        assert_eq!(taken(), expected);
    }
}
