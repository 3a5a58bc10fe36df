//! Channels that hold requests back: alarms, admission, drains.

use super::until_it_sleeps_for;
use crate::support::{Peer, TestSource};
use crate::{spawn, until};
use fathom_core::testing::TestDisk;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Polling, RequestId, WorkerHandle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Holds each request back for a while, and pops no requests while shut.
struct Gate {
    disk: Arc<TestDisk>,
    hold: Duration,
    shut: AtomicBool,
    timers: AtomicU64,
}

/// A [`Gate`] as a disk.
struct Gated(Arc<Gate>);

impl Disk for Gated {
    fn info(&self) -> DiskInfo {
        self.0.disk.info()
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(GateChannel {
            gate: self.0.clone(),
            below: self.0.disk.channel(cx)?,
            held: Vec::new(),
        }))
    }
}

struct GateChannel {
    gate: Arc<Gate>,
    below: Box<dyn Channel>,
    held: Vec<(u64, RequestId)>,
}

impl Channel for GateChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        let due = cx.now() + cx.clock().ticks(self.gate.hold);
        if cx.may_wait(id) {
            self.held.push((due, id));
            cx.wake_at(due);
        } else {
            self.below.submit(cx, id);
        }
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.below.complete(cx, id, tag, result);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.gate.timers.fetch_add(1, SeqCst);
        if self.gate.shut.load(SeqCst) {
            cx.close();
        }
        let now = cx.now();
        let (due, held) = self.held.drain(..).partition(|(due, _)| *due <= now);
        self.held = held;
        let due: Vec<_> = due;
        due.iter().for_each(|(_, id)| self.below.submit(cx, *id));
        self.held.iter().for_each(|(due, _)| cx.wake_at(*due));
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16) {
        for (_, id) in std::mem::take(&mut self.held) {
            self.below.submit(cx, id);
        }
    }
}

fn gate(hold: Duration, polling: Polling) -> (Arc<Gate>, WorkerHandle) {
    let gate = Arc::new(Gate {
        disk: TestDisk::new(),
        hold,
        shut: AtomicBool::new(false),
        timers: AtomicU64::new(0),
    });
    let disk: Arc<dyn Disk> = Arc::new(Gated(gate.clone()));
    let worker = spawn(module_path!(), &disk, polling);
    (gate, worker)
}

#[test]
fn a_worker_wakes_by_itself_for_what_is_held_back() {
    for polling in [Polling::Off, Polling::Fixed(Duration::from_secs(1))] {
        let hold = Duration::from_millis(20);
        let (gate, worker) = gate(hold, polling);
        let peer = Peer::new();
        worker.attach(TestSource::boxed(&peer, 8)).unwrap();
        for round in 0..5 {
            let start = Instant::now();
            peer.offer(2);
            until("both are answered", || peer.answered() == 2 * round + 2);
            assert!(start.elapsed() >= hold, "{:?}", start.elapsed());
        }
        // A timer may be early by rounding, but is never called in small steps.
        assert!(gate.timers.load(SeqCst) <= 20);
    }
}

#[test]
fn a_drain_waits_for_nothing_that_is_held_back() {
    let (_gate, worker) = gate(Duration::from_secs(3600), Polling::Off);
    let (leaving, staying) = (Peer::new(), Peer::new());
    let id = worker.attach(TestSource::boxed(&leaving, 8)).unwrap();
    worker.attach(TestSource::boxed(&staying, 8)).unwrap();
    leaving.offer(3);
    until("all are popped", || leaving.popped() == 3);
    drop(worker.detach(id));
    assert_eq!(leaving.answered(), 3);
    staying.offer(1);
    until("it is popped", || staying.popped() == 1);
    worker.look().unwrap();
    assert_eq!(staying.answered(), 0, "nobody drains this one");
}

#[test]
fn a_closed_channel_gets_nothing_and_loses_nothing() {
    for polling in [Polling::Off, Polling::Fixed(Duration::from_micros(20))] {
        closed_and_opened(polling);
    }
}

fn closed_and_opened(polling: Polling) {
    let (gate, worker) = gate(Duration::ZERO, polling);
    let peer = Peer::new();
    let id = worker.attach(TestSource::boxed(&peer, 8)).unwrap();
    for round in 0..20 {
        peer.offer(1);
        until("it is answered", || peer.answered() == 2 * round + 1);
        gate.shut.store(true, SeqCst);
        worker.look().unwrap();
        peer.offer(1);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(peer.popped(), 2 * round + 1);
        until_it_sleeps_for(Duration::from_millis(2), &worker);
        gate.shut.store(false, SeqCst);
        worker.look().unwrap();
        until("that one, too", || peer.answered() == 2 * round + 2);
    }
    gate.shut.store(true, SeqCst);
    worker.look().unwrap();
    drop(worker.detach(id));
}

/// The peer believes that these requests are in flight, so only this source can answer them.
#[test]
fn a_closed_channel_gets_what_was_inherited_before_it_is_left() {
    let (gate, worker) = gate(Duration::from_secs(3600), Polling::Off);
    gate.shut.store(true, SeqCst);
    worker.look().unwrap();
    let peer = Peer::new();
    peer.offer(5);
    let id = worker
        .attach(TestSource::with_inherited(&peer, 8, 3))
        .unwrap();
    worker.look().unwrap();
    assert_eq!(peer.popped(), 0);
    drop(worker.detach(id));
    assert_eq!((peer.popped(), peer.answered()), (3, 3));
}
