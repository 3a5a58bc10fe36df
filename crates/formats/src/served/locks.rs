//! Locks on ranges of numbers, which tasks hold across I/O.
//!
//! The numbers are those of guest clusters that are being allocated, or of tables that are being
//! created or read.
//!
//! Locks are granted in the order of the requests, no matter which worker runs the task. Otherwise
//! a worker whose tasks wait for each other would take a lock again before any other worker has
//! woken up, and would repeat that while its guest sends requests.

use parking_lot::Mutex;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Context, Poll, Waker};

/// A task that holds a range or waits for it.
struct Place {
    number: u64,
    range: Range<u64>,
    held: bool,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Inner {
    /// In the order of the requests.
    places: Vec<Place>,
    /// Number of the next place.
    number: u64,
}

impl Inner {
    fn position(&self, number: u64) -> usize {
        let at = self.places.iter().position(|place| place.number == number);
        at.expect("it is there until its guard is dropped")
    }

    /// Returns whether no earlier place overlaps the range.
    fn is_next(&self, at: usize) -> bool {
        let range = &self.places[at].range;
        let mut before = self.places[..at].iter();
        !before.any(|place| overlap(&place.range, range))
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Locks on ranges.
///
/// Few are held at any time: at most one for each task. The inner mutex is held only while the list
/// is searched.
#[derive(Default)]
pub(super) struct RangeLocks(Mutex<Inner>);

/// Releases the range when it is dropped, or stops waiting for it.
pub(super) struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    number: u64,
}

impl RangeLocks {
    /// Waits until no task holds a part of `range`, which is not empty, and locks it.
    ///
    /// The range is locked as a whole, so a waiting task never holds a part of it.
    pub(super) async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        let guard = self.enter(range);
        poll_fn(|cx| self.poll(guard.number, cx)).await;
        guard
    }

    /// Locks the whole range of numbers.
    pub(super) async fn lock_all(&self) -> RangeGuard<'_> {
        self.lock(0..u64::MAX).await
    }

    /// Locks the whole range, unless `over` becomes true first: `None`.
    ///
    /// A waiting task calls `over` each time that a lock is released.
    pub(super) async fn lock_all_unless(&self, over: impl Fn() -> bool) -> Option<RangeGuard<'_>> {
        let guard = self.enter(0..u64::MAX);
        let locked = poll_fn(|cx| match over() {
            true => Poll::Ready(false),
            false => self.poll(guard.number, cx).map(|()| true),
        });
        locked.await.then_some(guard)
    }

    fn enter(&self, range: Range<u64>) -> RangeGuard<'_> {
        let mut inner = self.0.lock();
        let number = inner.number;
        inner.number += 1;
        inner.places.push(Place {
            number,
            range,
            held: false,
            waker: None,
        });
        RangeGuard {
            locks: self,
            number,
        }
    }

    fn poll(&self, number: u64, cx: &Context) -> Poll<()> {
        let mut inner = self.0.lock();
        let at = inner.position(number);
        let is_next = inner.is_next(at);
        let place = &mut inner.places[at];
        place.held = is_next;
        match is_next {
            true => Poll::Ready(()),
            false => {
                place.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut inner = self.locks.0.lock();
        let at = inner.position(self.number);
        let gone = inner.places.remove(at);
        let mut woken = Vec::new();
        for behind in at..inner.places.len() {
            let waited = overlap(&inner.places[behind].range, &gone.range);
            if waited && (gone.held || inner.is_next(behind)) {
                woken.extend(inner.places[behind].waker.take());
            }
        }
        drop(inner);
        woken.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the output, if it is ready, and the waker's flag.
    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> (Option<T>, Arc<Woken>) {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        match future.poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => (Some(output), woken),
            Poll::Pending => (None, woken),
        }
    }

    fn was_woken(woken: &Woken) -> bool {
        woken.0.swap(false, Ordering::Relaxed)
    }

    #[test]
    fn who_came_first_is_first_even_if_he_looks_last() {
        let locks = RangeLocks::default();
        let (held, _) = poll(pin!(locks.lock_all()));
        let (mut first, mut second) = (pin!(locks.lock_all()), pin!(locks.lock_all()));
        let (none, wakes_first) = poll(first.as_mut());
        assert!(none.is_none() && poll(second.as_mut()).0.is_none());
        drop(held);
        assert!(was_woken(&wakes_first));
        // Neither the tasks that have waited nor a new one gets the lock.
        let (none, wakes_second) = poll(second.as_mut());
        assert!(none.is_none());
        assert!(poll(pin!(locks.lock_all())).0.is_none());
        let (held, _) = poll(first);
        assert!(held.is_some() && !was_woken(&wakes_second));
        drop(held);
        assert!(was_woken(&wakes_second));
        assert!(poll(second).0.is_some());
    }

    #[test]
    fn only_what_overlaps_waits() {
        let locks = RangeLocks::default();
        let (low, _) = poll(pin!(locks.lock(0..2)));
        let (high, _) = poll(pin!(locks.lock(2..4)));
        assert!(low.is_some() && high.is_some());
        let mut middle = pin!(locks.lock(1..3));
        assert!(poll(middle.as_mut()).0.is_none());
        drop(low);
        let (none, wakes) = poll(middle.as_mut());
        assert!(none.is_none());
        drop(high);
        assert!(was_woken(&wakes));
        assert!(poll(middle).0.is_some());
    }

    #[test]
    fn who_waits_no_more_is_in_nobodys_way() {
        let locks = RangeLocks::default();
        let (low, _) = poll(pin!(locks.lock(0..1)));
        let mut both = Box::pin(locks.lock(0..2));
        assert!(poll(both.as_mut()).0.is_none());
        let mut high = pin!(locks.lock(1..2));
        let (none, wakes) = poll(high.as_mut());
        assert!(none.is_none());
        drop(both);
        assert!(was_woken(&wakes));
        assert!(poll(high).0.is_some());
        drop(low);
        assert!(locks.0.lock().places.is_empty());
    }

    #[test]
    fn what_is_over_needs_no_lock() {
        let locks = RangeLocks::default();
        let over = AtomicBool::new(false);
        let (held, _) = poll(pin!(locks.lock_all()));
        let mut one = pin!(locks.lock_all_unless(|| over.load(Ordering::Relaxed)));
        let mut other = pin!(locks.lock_all_unless(|| over.load(Ordering::Relaxed)));
        let wakes = [poll(one.as_mut()).1, poll(other.as_mut()).1];
        over.store(true, Ordering::Relaxed);
        drop(held);
        assert!(wakes.iter().all(|woken| was_woken(woken)));
        // In any order.
        assert!(matches!(poll(other).0, Some(None)));
        assert!(matches!(poll(one).0, Some(None)));
        assert!(locks.0.lock().places.is_empty());
    }
}
