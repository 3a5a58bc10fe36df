//! Which flush makes what durable: by their numbers, which all channels share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Of a disk.
#[derive(Default)]
pub(super) struct Flushes {
    /// Writes that have been completed, and may have to be sent again.
    sequence: AtomicU64,
    /// Flushes that have been started.
    begun: AtomicU64,
    /// The last of them that has succeeded.
    last: AtomicU64,
    /// The first flush that makes all durable that has been written.
    needed: AtomicU64,
    /// The last flush that was made up because what it was for is given up.
    voided: AtomicU64,
    /// See [`Flushes::distrust`].
    is_distrusted: AtomicBool,
}

impl Flushes {
    /// The number of one more write that has been completed, and is not durable, and the first flush that
    /// makes it so. Flushes that begin from now on have that number, or larger ones.
    #[inline]
    pub(super) fn wrote(&self) -> (u64, u64) {
        let mark = self.begun.load(Ordering::SeqCst) + 1;
        self.needed.fetch_max(mark, Ordering::Relaxed);
        (self.sequence.fetch_add(1, Ordering::Relaxed), mark)
    }

    /// A flush begins; returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// This flush has succeeded, says the server.
    pub(super) fn succeeded(&self, number: u64) {
        if !self.is_distrusted() {
            self.last.fetch_max(number, Ordering::SeqCst);
        }
    }

    /// The last flush that has succeeded.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// The first flush that makes all durable that has been written until now.
    pub(super) fn needed(&self) -> u64 {
        self.needed.load(Ordering::SeqCst)
    }

    /// The server has failed to flush: what it says of other flushes is not believed, until all has been
    /// written again.
    pub(super) fn distrust(&self) {
        self.is_distrusted.store(true, Ordering::SeqCst);
    }

    pub(super) fn trust(&self) {
        self.is_distrusted.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Ordering::SeqCst)
    }

    /// Nothing that was written until now is to be written again. Returns the flush that stands for that: see
    /// [`Flushes::has_ended`].
    pub(super) fn void(&self) -> u64 {
        let number = self.begin();
        self.voided.fetch_max(number, Ordering::SeqCst);
        number
    }

    /// Nobody writes it any more.
    pub(super) fn has_ended(&self, voided: u64) {
        self.last.fetch_max(voided, Ordering::SeqCst);
    }

    /// Another number than before: what was kept then is not to be written any more.
    pub(super) fn voided(&self) -> u64 {
        self.voided.load(Ordering::SeqCst)
    }
}
