//! Tracks flushes in flight, and decides which of them an error of the kernel concerns.
//!
//! The kernel reports lost writes to one caller of fdatasync(2) for each open file. A flush may
//! therefore succeed only because another flush through the same open file has just received the
//! error, and that flush's worker has not seen it yet. Therefore a successful flush completes only
//! when the results of all flushes that began before it ended have been seen. With `Cache::None`,
//! no cached writes can be lost, and no flush waits.
//!
//! Workers that wait for each other's flushes are slow. If the kernel is known to report errors to
//! each open file, a disk with several workers is opened again for each of them ([`OwnFile`]). The
//! kernel then reports lost writes to each worker.
//!
//! Memory order: a worker publishes a flush (`begun`, `oldest`) before it hands the flush to the
//! kernel. Suppose the kernel reports an error to that flush before it lets another one succeed.
//! The kernel's lock of the file's error then orders the other worker after the publication. A
//! worker stores a failure before it withdraws the flush (`in_flight`, `oldest`, with release). A
//! worker that sees the withdrawal (with acquire) therefore sees the failure.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Value of `oldest` while no flush is in flight.
const NONE: u64 = u64::MAX;

/// All flushes through one open file.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// Whether the kernel has reported lost writes to this or another open file of the disk. The
    /// kernel reports them once, so later flushes prove nothing.
    failed: Arc<AtomicBool>,
    /// Number of flushes that have begun; also the number of the next flush.
    begun: AtomicU64,
    /// Number of flushes whose result has not been seen.
    in_flight: AtomicU64,
    /// For each flusher, the number of its oldest flush in flight.
    oldest: Mutex<Vec<Weak<AtomicU64>>>,
}

impl Flushes {
    /// Returns whether writes were lost, so that no flush can succeed any more.
    #[inline]
    pub(super) fn have_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Makes the state of flushes of the same disk through another open file.
    pub(super) fn by_another_file(&self) -> Flushes {
        Flushes {
            failed: self.failed.clone(),
            ..Flushes::default()
        }
    }

    /// Adds a flusher of this file: a worker, or a thread that waits for its flush.
    pub(super) fn flusher(self: &Arc<Self>) -> Flusher {
        self.add_flusher(&mut self.oldest.lock())
    }

    /// Adds a flusher, if the file has no other one.
    pub(super) fn only_flusher(self: &Arc<Self>) -> Option<Flusher> {
        let mut all = self.oldest.lock();
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

    /// Returns whether the results of all flushes before this number have been seen.
    fn are_seen(&self, before: u64) -> bool {
        let oldest = self.oldest.lock();
        let mut oldest = oldest.iter().filter_map(Weak::upgrade);
        oldest.all(|oldest| oldest.load(Ordering::Acquire) >= before)
    }
}

/// Another open file of the disk's image, through which one worker flushes.
#[derive(Debug)]
pub(super) struct OwnFile {
    pub(super) file: File,
    pub(super) flushes: Arc<Flushes>,
}

/// The flushes of a single flusher.
#[derive(Debug)]
pub(super) struct Flusher {
    all: Arc<Flushes>,
    oldest: Arc<AtomicU64>,
    /// Numbers of this flusher's flushes in flight, in ascending order.
    own: VecDeque<u64>,
}

/// Outcome of a successful flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Durable,
    /// Writes were lost.
    Lost,
    /// Undecided: flushes before this number may have received a report of lost writes. Ask again.
    After(u64),
}

impl Flusher {
    /// Begins a flush; called before the kernel receives it. Returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        self.all.in_flight.fetch_add(1, Ordering::AcqRel);
        let number = self.all.begun.fetch_add(1, Ordering::AcqRel);
        self.own.push_back(number);
        self.publish();
        number
    }

    /// Ends the flush of this number, which the kernel reported as successful.
    pub(super) fn succeeded(&mut self, number: u64) -> Verdict {
        let before = self.all.begun.load(Ordering::Acquire);
        match self.end(number) {
            // No other flush has an unknown result.
            0 if !self.all.have_failed() => Verdict::Durable,
            0 => Verdict::Lost,
            _ => self.verdict(before),
        }
    }

    /// Ends the flush of this number, which has failed.
    pub(super) fn failed(&mut self, number: u64) {
        self.all.fail();
        self.end(number);
    }

    /// Returns the outcome of a successful flush that must wait for all flushes before this number.
    pub(super) fn verdict(&self, before: u64) -> Verdict {
        let are_seen = self.all.are_seen(before);
        match (self.all.have_failed(), are_seen) {
            (true, _) => Verdict::Lost,
            (false, true) => Verdict::Durable,
            (false, false) => Verdict::After(before),
        }
    }

    /// Ends a flush. Returns the number of flushes of all flushers that are still in flight.
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
        // A flush that begins later cannot have received the report.
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
