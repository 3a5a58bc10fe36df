//! What a worker counts, for others to read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count with one writer.
#[derive(Default)]
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

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a worker did besides moving requests.
#[derive(Default)]
pub struct Counters {
    /// Requests taken from sources.
    pub taken: Counter,
    /// Requests answered: of these, and never more.
    pub answered: Counter,
    /// Interrupts sent.
    pub notifications: Counter,
    /// Times that it went to sleep.
    pub sleeps: Counter,
    /// Ticks of the clock in which it looked for work instead of sleeping.
    pub polled: Counter,
    /// Requests that sources have answered with an error by themselves.
    pub refused: Counter,
}
