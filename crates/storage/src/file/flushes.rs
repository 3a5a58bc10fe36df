//! Flushes in flight, and which of them an error concerns.
//!
//! The kernel reports lost writes to one caller of fdatasync(2) for each open file. A flush that returns success may do
//! so only because another flush by the same open file has just been told of the error, which that flush's worker has
//! not seen yet. So a successful flush is answered only when the results of all flushes that began before it ended have
//! been seen. Where the page cache is bypassed, no cached writes can be lost, and nothing waits.
//!
//! Workers that wait for each other's flushes are slow. A disk with several workers is opened once more for each of them
//! ([`OwnFile`]), where the kernel is known to report errors to each open file. The kernel then reports
//! lost writes to each worker.
//!
//! Memory order: a worker publishes a flush (`begun`, `oldest`) before it hands the flush to the kernel. If the kernel
//! told that flush of an error before it let another one succeed, the worker of the other one has been ordered after
//! the publication by the kernel's lock of the file's error. A worker stores a failure before it takes the flush back
//! (`in_flight`, `oldest`, with release), and whoever sees that it was taken back (with acquire) sees the failure.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// No flush is in flight.
const NONE: u64 = u64::MAX;

/// All flushes by an open file.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// The kernel has reported that it lost cached writes, to this open file or another one of the disk. It says so once
    /// and then forgets, so later flushes prove nothing.
    failed: Arc<AtomicBool>,
    /// Number of flushes that have begun, which number them.
    begun: AtomicU64,
    /// Number of flushes whose result has not been seen.
    in_flight: AtomicU64,
    /// The number of each flusher's oldest flush in flight.
    oldest: Mutex<Vec<Weak<AtomicU64>>>,
}

impl Flushes {
    /// Whether writes were lost, so that no flush can succeed any more.
    #[inline]
    pub(super) fn have_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// The flushes of the same disk by another open file.
    pub(super) fn by_another_file(&self) -> Flushes {
        Flushes {
            failed: self.failed.clone(),
            ..Flushes::default()
        }
    }

    /// A new flusher of this file: a worker, or a thread that waits for its flush.
    pub(super) fn flusher(self: &Arc<Self>) -> Flusher {
        self.add_flusher(&mut self.oldest())
    }

    /// A new flusher, if the file has no other one.
    pub(super) fn only_flusher(self: &Arc<Self>) -> Option<Flusher> {
        let mut all = self.oldest();
        let is_free = all.iter().all(|oldest| oldest.strong_count() == 0);
        is_free.then(|| self.add_flusher(&mut all))
    }

    fn add_flusher(self: &Arc<Self>, all: &mut Vec<Weak<AtomicU64>>) -> Flusher {
        let oldest = Arc::new(AtomicU64::new(NONE));
        all.retain(|oldest| oldest.strong_count() > 0);
        all.push(Arc::downgrade(&oldest));
        Flusher {
            all: self.clone(),
            oldest,
            own: VecDeque::new(),
        }
    }

    fn oldest(&self) -> MutexGuard<'_, Vec<Weak<AtomicU64>>> {
        self.oldest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the results of all flushes before this number have been seen.
    fn are_seen(&self, before: u64) -> bool {
        let oldest = self.oldest();
        let mut oldest = oldest.iter().filter_map(Weak::upgrade);
        oldest.all(|oldest| oldest.load(Ordering::Acquire) >= before)
    }
}

/// The disk's file, opened once more: one worker flushes by it.
#[derive(Debug)]
pub(super) struct OwnFile {
    pub(super) file: File,
    pub(super) flushes: Arc<Flushes>,
}

/// One flusher's flushes.
#[derive(Debug)]
pub(super) struct Flusher {
    all: Arc<Flushes>,
    oldest: Arc<AtomicU64>,
    /// Numbers of those in flight, in order.
    own: VecDeque<u64>,
}

/// What a flush that succeeded may be answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Durable,
    /// Writes were lost.
    Lost,
    /// Ask again: flushes before this number may have been told of lost writes.
    After(u64),
}

impl Flusher {
    /// Begins a flush, before the kernel gets it. Returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        self.all.in_flight.fetch_add(1, Ordering::AcqRel);
        let number = self.all.begun.fetch_add(1, Ordering::AcqRel);
        self.own.push_back(number);
        self.publish();
        number
    }

    /// The flush of this number has succeeded.
    pub(super) fn succeeded(&mut self, number: u64) -> Verdict {
        let before = self.all.begun.load(Ordering::Acquire);
        match self.end(number) {
            // Nobody else's result is unknown.
            0 if !self.all.have_failed() => Verdict::Durable,
            0 => Verdict::Lost,
            _ => self.verdict(before),
        }
    }

    /// The flush of this number has failed.
    pub(super) fn failed(&mut self, number: u64) {
        self.all.fail();
        self.end(number);
    }

    /// What a flush can be answered with that has to wait for all before this number.
    pub(super) fn verdict(&self, before: u64) -> Verdict {
        let are_seen = self.all.are_seen(before);
        match (self.all.have_failed(), are_seen) {
            (true, _) => Verdict::Lost,
            (false, true) => Verdict::Durable,
            (false, false) => Verdict::After(before),
        }
    }

    /// Returns the number of flushes that are still in flight, of all flushers.
    fn end(&mut self, number: u64) -> u64 {
        self.own.retain(|own| *own != number);
        self.publish();
        self.all.in_flight.fetch_sub(1, Ordering::AcqRel) - 1
    }

    fn publish(&self) {
        let oldest = self.own.front().copied().unwrap_or(NONE);
        self.oldest.store(oldest, Ordering::Release);
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        let left = self.own.len() as u64;
        self.all.in_flight.fetch_sub(left, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_waits_for_flushes_that_began_before_it_ended() {
        let all = Arc::new(Flushes::default());
        let (mut one, mut other) = (all.flusher(), all.flusher());
        let (a, b) = (one.begin(), other.begin());
        let Verdict::After(before) = other.succeeded(b) else {
            panic!("the first flush may have been told of an error");
        };
        // One that begins later cannot have been told of it.
        let later = other.begin();
        assert_eq!(other.verdict(before), Verdict::After(before));
        assert_eq!(one.succeeded(a), Verdict::After(later + 1));
        assert_eq!(other.verdict(before), Verdict::Durable);
        assert_eq!(other.succeeded(later), Verdict::Durable);
    }

    #[test]
    fn flush_fails_if_the_error_was_told_to_another_flusher() {
        let all = Arc::new(Flushes::default());
        let (mut one, mut other) = (all.flusher(), all.flusher());
        let (a, b) = (one.begin(), other.begin());
        let Verdict::After(before) = other.succeeded(b) else {
            panic!("the first flush may have been told of an error");
        };
        one.failed(a);
        assert_eq!(other.verdict(before), Verdict::Lost);
        let c = other.begin();
        assert_eq!(other.succeeded(c), Verdict::Lost);
    }

    #[test]
    fn flush_waits_for_none_by_another_file_but_shares_its_error() {
        let all = Arc::new(Flushes::default());
        let by_other = Arc::new(all.by_another_file());
        let (mut one, mut other) = (all.flusher(), by_other.flusher());
        let (a, b) = (one.begin(), other.begin());
        assert_eq!(other.succeeded(b), Verdict::Durable);
        one.failed(a);
        let c = other.begin();
        assert_eq!(other.succeeded(c), Verdict::Lost);
    }

    #[test]
    fn file_has_one_only_flusher_at_a_time() {
        let all = Arc::new(Flushes::default());
        let one = all.only_flusher().expect("nobody flushes");
        assert!(all.only_flusher().is_none());
        drop(one);
        assert!(all.only_flusher().is_some());
    }

    #[test]
    fn flushes_of_one_flusher_wait_for_each_other() {
        let all = Arc::new(Flushes::default());
        let mut one = all.flusher();
        let (a, b) = (one.begin(), one.begin());
        assert_eq!(one.succeeded(b), Verdict::After(b + 1));
        assert_eq!(one.succeeded(a), Verdict::Durable);
        assert_eq!(one.verdict(b + 1), Verdict::Durable);
    }
}
