//! What a worker counts, for others to read.

use fathom_trace::Clock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A count with one writer.
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

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Batches by how many requests they have: at most 1, 2, 4, and so on, the last any number.
pub const BATCH_SIZES: usize = 9;

/// What a worker did besides moving requests.
#[derive(Default)]
pub struct Counters {
    /// Requests taken from sources.
    pub taken: Counter,
    /// Requests answered: of these, and never more.
    pub answered: Counter,
    /// Requests that were taken together, by their number.
    pub batches: [Counter; BATCH_SIZES],
    /// Wake-ups by peers that have work.
    pub kicks: Counter,
    /// Interrupts sent.
    pub notifications: Counter,
    /// Times that it went to sleep.
    pub sleeps: Counter,
    /// Time that the worker has polled, in nanoseconds.
    pub polled_ns: Counter,
    /// Times that it did so and found some, and that it did not.
    pub polls_paid: Counter,
    pub polls_vain: Counter,
    /// Requests that sources have answered with an error by themselves.
    pub refused: Counter,
    /// Of the sources that it has.
    sources: Mutex<Vec<Arc<SourceCounters>>>,
}

/// What a worker did for one of its sources.
#[derive(Debug, Default)]
pub struct SourceCounters {
    /// The number of a virtqueue; None: it is a connection.
    pub queue: Option<u16>,
    /// Requests that can be in flight.
    pub capacity: u64,
    pub taken: Counter,
    pub in_flight: Counter,
    pub kicks: Counter,
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
        self.lock().push(source.clone());
        source
    }

    pub(crate) fn remove_source(&self, source: &Arc<SourceCounters>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, source));
    }

    /// Of the sources that it has now.
    pub fn sources(&self) -> Vec<Arc<SourceCounters>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<SourceCounters>>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
