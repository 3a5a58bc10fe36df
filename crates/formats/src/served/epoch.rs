//! When a freed cluster can be used again.
//!
//! A request in flight may still use a cluster that another has freed
//! meanwhile: a write one that was discarded, a read one that was copied so
//! that a part of it could be written. (What overlaps it may change what a read
//! sees, but never to bytes that were at no time the guest's there.) So each of
//! them is counted in the epoch in which it looked its cluster up, an epoch ends
//! only when all requests of the one before have completed, and what was freed
//! in an epoch is free two epochs later.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(super) struct Epochs {
    current: AtomicU64,
    workers: Mutex<Vec<Arc<InFlight>>>,
}

/// One worker's requests, by their epoch's parity. The worker alone changes it.
#[derive(Default)]
pub(super) struct InFlight([AtomicU32; 2]);

impl InFlight {
    /// Returns how many there were.
    fn add(&self, parity: u8, n: i32) -> u32 {
        let count = &self.0[usize::from(parity)];
        let before = count.load(Ordering::Relaxed);
        count.store(before.wrapping_add_signed(n), Ordering::Release);
        before
    }
}

impl Epochs {
    /// A worker's counts.
    pub(super) fn register(&self) -> Arc<InFlight> {
        let counts = Arc::new(InFlight::default());
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of workers that are gone.
        workers.retain(|counts| Arc::strong_count(counts) > 1);
        workers.push(counts.clone());
        counts
    }

    /// A request starts, before it looks anything up. The result is for
    /// [`Epochs::leave`].
    #[inline]
    pub(super) fn enter(&self, counts: &InFlight) -> u8 {
        loop {
            let epoch = self.current.load(Ordering::Acquire);
            let parity = (epoch & 1) as u8;
            if counts.add(parity, 1) > 0 {
                // An earlier request of this worker, which everyone sees, keeps
                // the epoch from ending: no fence for all but the first.
                return parity;
            }
            // Whoever ends the epoch sees the count, or is seen here.
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

    /// Whether all requests have ended that may have started in this epoch or before.
    pub(super) fn is_over(&self, epoch: u64) -> bool {
        // An epoch ends with each call, if nothing older is in flight.
        (0..3).any(|_| self.reusable().is_some_and(|reusable| reusable >= epoch))
    }

    /// The epoch in which something is freed that nobody can look up any more.
    pub(super) fn now(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.current.load(Ordering::Relaxed)
    }

    /// What was freed in this epoch or earlier can be used; 0: nothing can.
    /// Ends the current epoch if that is possible.
    pub(super) fn reusable(&self) -> Option<u64> {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
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

/// A task's place in an epoch, which it leaves when it ends.
pub(super) struct InEpoch {
    epochs: Arc<Epochs>,
    counts: Arc<InFlight>,
    parity: u8,
}

impl InEpoch {
    /// For a request that has entered already: the task leaves in its place.
    pub(super) fn adopt(epochs: Arc<Epochs>, counts: Arc<InFlight>, parity: u8) -> InEpoch {
        InEpoch {
            epochs,
            counts,
            parity,
        }
    }

    /// Does `wait` outside of any epoch: whoever waits for clusters to become
    /// free must not be in their way, and starts anew afterwards.
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

    /// A worker that always has requests in flight, and another thread that frees what it uses.
    #[test]
    fn nothing_is_used_again_under_a_reader() {
        const FREE: u64 = u64::MAX;
        let epochs = Epochs::default();
        let counts = epochs.register();
        // What is linked has its own number in it.
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
                    // One or two at a time: the second needs no fence.
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
