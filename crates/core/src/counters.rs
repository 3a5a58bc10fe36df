//! A worker's counters, which other threads read.

use fathom_trace::Clock;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with a single writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn increment(&self) {
        self.add(1);
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count + n, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Returns the current value. The writer may increase it at any time.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Number of batch size classes: batches of up to 1, 2, 4, ... requests; the last is unlimited.
pub const BATCH_SIZES: usize = 9;

/// Counters of a worker.
#[derive(Default)]
pub struct Counters {
    /// Requests taken from sources.
    pub taken: Counter,
    /// Requests answered. Never more than `taken`.
    pub answered: Counter,
    /// Number of batches in each size class.
    pub batches: [Counter; BATCH_SIZES],
    /// Kicks received from peers.
    pub kicks: Counter,
    /// Notifications (interrupts) sent.
    pub notifications: Counter,
    /// Number of times that the worker went to sleep.
    pub sleeps: Counter,
    /// Time that the worker has spent polling, in nanoseconds.
    pub polled_ns: Counter,
    /// Number of polls that found work.
    pub polls_paid: Counter,
    /// Number of polls that found no work.
    pub polls_vain: Counter,
    /// Requests that sources have answered with an error themselves.
    pub refused: Counter,
    /// Counters of the attached sources.
    sources: Mutex<Vec<Arc<SourceCounters>>>,
}

/// Counters of one source of a worker.
#[derive(Debug, Default)]
pub struct SourceCounters {
    /// Queue number of a virtqueue; none for a connection.
    pub queue: Option<u16>,
    /// Maximum number of requests in flight.
    pub capacity: u64,
    /// Requests taken from the source.
    pub taken: Counter,
    /// Number of requests in flight at present.
    pub in_flight: Counter,
    /// Kicks received from the source's peer.
    pub kicks: Counter,
    /// Notifications (interrupts) sent to the source's peer.
    pub notifications: Counter,
}

impl Counters {
    #[inline]
    pub(crate) fn took(&self, requests: usize) {
        self.taken.add(requests as u64);
        let size = requests.next_power_of_two().trailing_zeros() as usize;
        self.batches[size.min(BATCH_SIZES - 1)].increment();
    }

    pub(crate) fn polled(&self, ticks: u64, found: bool) {
        self.polled_ns.add(Clock::get().interval_ns(ticks));
        match found {
            true => self.polls_paid.increment(),
            false => self.polls_vain.increment(),
        }
    }

    pub(crate) fn add_source(&self, queue: Option<u16>, capacity: usize) -> Arc<SourceCounters> {
        let source = Arc::new(SourceCounters {
            queue,
            capacity: capacity as u64,
            ..SourceCounters::default()
        });
        self.sources.lock().push(source.clone());
        source
    }

    pub(crate) fn remove_source(&self, source: &Arc<SourceCounters>) {
        self.sources
            .lock()
            .retain(|other| !Arc::ptr_eq(other, source));
    }

    /// Returns the counters of the sources that are attached now.
    pub fn sources(&self) -> Vec<Arc<SourceCounters>> {
        self.sources.lock().clone()
    }
}
