//! Decides when a freed cluster can be used again.
//!
//! A request in flight may still use a cluster that another request has freed meanwhile. A write
//! may use a cluster that was discarded. A read may use a cluster that was copied because a part
//! of it was to be written. (An overlapping request may change what a read returns, but never to
//! bytes that the guest never had there.)
//!
//! Therefore each request is counted in the epoch in which it looked its cluster up. An epoch ends
//! only when all requests of the epoch before have completed. A cluster freed in an epoch can be
//! used two epochs later.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[derive(Default)]
pub(super) struct Epochs {
    current: AtomicU64,
    workers: Mutex<Vec<Arc<InFlight>>>,
}

/// Number of one worker's requests by the parity of their epoch. Only that worker changes it.
#[derive(Default)]
pub(super) struct InFlight([AtomicU32; 2]);

impl InFlight {
    /// Adds `n` and returns the number before.
    fn add(&self, parity: u8, n: i32) -> u32 {
        let count = &self.0[usize::from(parity)];
        let before = count.load(Ordering::Relaxed);
        count.store(before.wrapping_add_signed(n), Ordering::Release);
        before
    }
}

impl Epochs {
    /// Registers a worker and returns its counts.
    pub(super) fn register(&self) -> Arc<InFlight> {
        let counts = Arc::new(InFlight::default());
        let mut workers = self.workers.lock();
        // Removes the counts of workers that have ended.
        workers.retain(|counts| Arc::strong_count(counts) > 1);
        workers.push(counts.clone());
        counts
    }

    /// Counts a request, before it looks anything up. Pass the result to [`Epochs::leave`].
    #[inline]
    pub(super) fn enter(&self, counts: &InFlight) -> u8 {
        loop {
            let epoch = self.current.load(Ordering::Acquire);
            let parity = (epoch & 1) as u8;
            if counts.add(parity, 1) > 0 {
                // An earlier request of this worker, which everyone sees, keeps the epoch from
                // ending. Only the first request therefore needs a fence.
                return parity;
            }
            // A thread that ends the epoch sees the count, or its new epoch is seen here.
            fence(Ordering::SeqCst);
            if self.current.load(Ordering::Acquire) == epoch {
                return parity;
            }
            counts.add(parity, -1);
        }
    }

    #[inline]
    pub(super) fn leave(&self, counts: &InFlight, parity: u8) {
        counts.add(parity, -1);
    }

    /// Returns whether all requests have ended that may have started in this epoch or before.
    pub(super) fn is_over(&self, epoch: u64) -> bool {
        // Each call ends an epoch if nothing older is in flight.
        (0..3).any(|_| self.reusable().is_some_and(|reusable| reusable >= epoch))
    }

    /// Returns the epoch of a cluster that is freed now and that no look-up can find any more.
    pub(super) fn now(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.current.load(Ordering::Relaxed)
    }

    /// Returns the last epoch whose freed clusters can be used; `None` if no such epoch exists yet.
    ///
    /// Ends the current epoch if that is possible.
    pub(super) fn reusable(&self) -> Option<u64> {
        let workers = self.workers.lock();
        let epoch = self.current.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let before = usize::from(epoch & 1 == 0);
        let idle = |counts: &Arc<InFlight>| counts.0[before].load(Ordering::Acquire) == 0;
        if workers.iter().all(idle) {
            self.current.store(epoch + 1, Ordering::SeqCst);
            return (epoch + 1).checked_sub(2);
        }
        epoch.checked_sub(2)
    }
}

/// A task's membership in an epoch, which ends when it is dropped.
pub(super) struct InEpoch {
    epochs: Arc<Epochs>,
    counts: Arc<InFlight>,
    parity: u8,
}

impl InEpoch {
    /// Takes over the membership of a request that has entered already.
    pub(super) fn adopt(epochs: Arc<Epochs>, counts: Arc<InFlight>, parity: u8) -> InEpoch {
        InEpoch {
            epochs,
            counts,
            parity,
        }
    }

    /// Awaits `wait` outside of any epoch, then enters the current epoch.
    ///
    /// A task that waits for clusters to become free must not hold up its own epoch. Afterwards
    /// it has to look its clusters up again.
    pub(super) async fn outside<T>(&mut self, wait: impl Future<Output = T>) -> T {
        self.epochs.leave(&self.counts, self.parity);
        let outcome = wait.await;
        self.parity = self.epochs.enter(&self.counts);
        outcome
    }
}

impl Drop for InEpoch {
    fn drop(&mut self) {
        self.epochs.leave(&self.counts, self.parity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_freed_waits_for_the_requests_in_flight() {
        let epochs = Epochs::default();
        let (one, two) = (epochs.register(), epochs.register());
        let in_flight = epochs.enter(&one);
        let freed = epochs.now();
        let later = epochs.enter(&two);
        let is_free = || epochs.reusable().is_some_and(|epoch| epoch >= freed);
        (0..5).for_each(|_| assert!(!is_free()));
        epochs.leave(&two, later);
        let newest = epochs.enter(&two);
        (0..5).for_each(|_| assert!(!is_free()));
        epochs.leave(&one, in_flight);
        assert!((0..3).any(|_| is_free()), "nothing older is in flight");
        epochs.leave(&two, newest);
    }

    /// A worker always has requests in flight while another thread frees the clusters they use.
    #[test]
    fn nothing_is_used_again_under_a_reader() {
        const FREE: u64 = u64::MAX;
        let epochs = Epochs::default();
        let counts = epochs.register();
        // A linked cluster holds its own number.
        let clusters = [AtomicU64::new(0), AtomicU64::new(FREE)];
        let linked = AtomicU64::new(0);
        let (stop, wrong) = (AtomicU64::new(0), AtomicU64::new(0));
        let holds = |number: u64| clusters[number as usize % 2].load(Ordering::Acquire) == number;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut flights = std::collections::VecDeque::new();
                while stop.load(Ordering::Relaxed) == 0 {
                    let parity = epochs.enter(&counts);
                    let number = linked.load(Ordering::Acquire);
                    flights.push_back((parity, number));
                    // Keeps one or two requests in flight: the second needs no fence.
                    while flights.len() > 1 + usize::from(parity == 0) {
                        let (parity, number) = flights.pop_front().expect("more than one");
                        wrong.fetch_add((!holds(number)).into(), Ordering::Relaxed);
                        epochs.leave(&counts, parity);
                    }
                }
            });
            for number in 1..300 {
                // Epochs end at other times, too.
                for _ in 0..number % 3 {
                    epochs.reusable();
                }
                std::thread::yield_now();
                let [old, new] = [number - 1, number].map(|n: u64| &clusters[n as usize % 2]);
                new.store(number, Ordering::Release);
                linked.store(number, Ordering::Release);
                let freed = epochs.now();
                while epochs.reusable().is_none_or(|epoch| epoch < freed) {
                    std::thread::yield_now();
                }
                old.store(FREE, Ordering::Release);
            }
            stop.store(1, Ordering::Relaxed);
        });
        assert_eq!(wrong.into_inner(), 0);
    }
}
