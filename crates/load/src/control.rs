//! Shared state of the supervising thread and the workers.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Phase of a run. Workers read it once per batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Send requests that are not counted.
    Ramp,
    /// Send requests that are counted.
    Measure,
    /// Send no new requests. Requests in flight complete, and verification follows.
    Stop,
    /// Stop at once, because a worker or the supervisor has failed.
    Abort,
}

/// State of one worker, aligned to cache lines of its own to avoid false sharing.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Seat {
    completed: AtomicU64,
    in_flight: AtomicU32,
    closed: AtomicBool,
    finished: AtomicBool,
}

/// State shared by all threads of a run.
#[derive(Debug)]
pub struct Control {
    phase: AtomicU8,
    seats: Vec<Seat>,
}

impl Seat {
    /// Publishes the number of completed requests and the number in flight.
    #[inline(always)]
    pub fn publish(&self, completed: u64, in_flight: u32) {
        self.completed.store(completed, Ordering::Relaxed);
        self.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Records that the worker's measured window has ended.
    pub fn close_window(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns a guard that marks the worker as finished when it is dropped, for any reason.
    pub fn finish_on_drop(&self) -> FinishGuard<'_> {
        FinishGuard(self)
    }

    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// See [`Seat::finish_on_drop`].
#[derive(Debug)]
pub struct FinishGuard<'a>(&'a Seat);

impl Drop for FinishGuard<'_> {
    fn drop(&mut self) {
        self.0.finished.store(true, Ordering::Release);
    }
}

impl Control {
    pub fn new(workers: u16) -> Control {
        Control {
            phase: AtomicU8::new(Phase::Ramp as u8),
            seats: (0..workers).map(|_| Seat::default()).collect(),
        }
    }

    #[inline(always)]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Ramp,
            1 => Phase::Measure,
            2 => Phase::Stop,
            _ => Phase::Abort,
        }
    }

    /// Advances to a later phase. An abort is final.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::Relaxed);
    }

    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    pub fn completed(&self) -> u64 {
        self.seats.iter().map(Seat::completed).sum()
    }

    pub fn all_windows_closed(&self) -> bool {
        let closed = |s: &Seat| s.closed.load(Ordering::Acquire) || s.is_finished();
        self.seats.iter().all(closed)
    }

    pub fn all_finished(&self) -> bool {
        self.seats.iter().all(Seat::is_finished)
    }
}
