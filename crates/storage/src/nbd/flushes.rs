//! Numbers flushes across all channels, to know which flush makes which write durable.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The flushes of one disk.
#[derive(Default)]
pub(super) struct Flushes {
    /// Number of writes that have been completed and may have to be sent again.
    sequence: AtomicU64,
    /// Number of flushes that have begun.
    begun: AtomicU64,
    /// Number of the last flush that has succeeded.
    last: AtomicU64,
    /// Number of the first flush that makes all completed writes durable.
    needed: AtomicU64,
    /// Number of the last fictitious flush, which stands for writes that were given up.
    voided: AtomicU64,
    /// See [`Flushes::distrust`].
    is_distrusted: AtomicBool,
}

impl Flushes {
    /// Counts a completed write that is not durable. Returns its sequence number and the number of
    /// the first flush that makes it durable. Flushes that begin from now on have that number or
    /// larger ones.
    #[inline]
    pub(super) fn wrote(&self) -> (u64, u64) {
        let mark = self.begun.load(Ordering::SeqCst) + 1;
        self.needed.fetch_max(mark, Ordering::Relaxed);
        (self.sequence.fetch_add(1, Ordering::Relaxed), mark)
    }

    /// Begins a flush and returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Records that the server has reported this flush as successful.
    pub(super) fn succeeded(&self, number: u64) {
        if !self.is_distrusted() {
            self.last.fetch_max(number, Ordering::SeqCst);
        }
    }

    /// Returns the number of the last flush that has succeeded.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Returns the number of the first flush that makes all writes completed so far durable.
    pub(super) fn needed(&self) -> u64 {
        self.needed.load(Ordering::SeqCst)
    }

    /// Records that the server has failed to flush. Further successes are ignored until all kept
    /// writes have been sent again.
    pub(super) fn distrust(&self) {
        self.is_distrusted.store(true, Ordering::SeqCst);
    }

    pub(super) fn trust(&self) {
        self.is_distrusted.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Ordering::SeqCst)
    }

    /// Gives up all writes completed so far: they are not sent again. Returns the number of the
    /// fictitious flush that stands for them, see [`Flushes::has_ended`].
    pub(super) fn void(&self) -> u64 {
        let number = self.begin();
        self.voided.fetch_max(number, Ordering::SeqCst);
        number
    }

    /// Marks the fictitious flush as successful, once no thread sends the given-up writes any more.
    pub(super) fn has_ended(&self, voided: u64) {
        self.last.fetch_max(voided, Ordering::SeqCst);
    }

    /// Returns a number that changes when kept writes are given up; writes kept before must then
    /// not be sent.
    pub(super) fn voided(&self) -> u64 {
        self.voided.load(Ordering::SeqCst)
    }
}
