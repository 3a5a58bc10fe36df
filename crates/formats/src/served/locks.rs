//! Locks that tasks hold across I/O, on ranges of numbers: guest clusters
//! that are being allocated, tables that are being made or read.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

#[derive(Default)]
struct Inner {
    held: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

/// Few are held at any time: one for each task at most. The mutex within is
/// held for a look at the list only.
#[derive(Default)]
pub(super) struct RangeLocks(Mutex<Inner>);

/// Unlocks when dropped.
pub(super) struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl RangeLocks {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody holds a part of `range`, which is not empty. Ranges
    /// are locked whole, so nobody waits while holding a part.
    pub(super) async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        poll_fn(|cx| {
            let mut inner = self.inner();
            let overlaps = |held: &Range<u64>| held.start < range.end && range.start < held.end;
            if inner.held.iter().any(overlaps) {
                inner.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            inner.held.push(range.clone());
            Poll::Ready(())
        })
        .await;
        RangeGuard { locks: self, range }
    }

    /// The lock of everything.
    pub(super) async fn lock_all(&self) -> RangeGuard<'_> {
        self.lock(0..u64::MAX).await
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut inner = self.locks.inner();
        let at = inner.held.iter().position(|held| *held == self.range);
        inner.held.swap_remove(at.expect("it was held"));
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        waiting.into_iter().for_each(Waker::wake);
    }
}
