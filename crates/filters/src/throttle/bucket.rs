//! A leaky bucket in one atomic (the generic cell rate algorithm).

use std::sync::atomic::{AtomicU64, Ordering};

/// Stores the tick at which the bucket will be empty. The distance to that tick is the bucket's
/// level.
#[derive(Default)]
pub(super) struct Bucket(AtomicU64);

/// A rate and the room for bursts, both expressed as time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    /// Ticks in which one unit leaks out.
    pub(super) ticks_per_unit: f64,
    /// Ticks in which a full bucket leaks empty.
    pub(super) room: u64,
}

impl Bucket {
    /// Pours `units` in at the first tick, from `now` on, at which the bucket is not overfull.
    /// Returns that tick. The next caller gets a later tick, so callers need no other coordination.
    pub(super) fn reserve(&self, rate: Rate, units: f64, now: u64) -> u64 {
        let cost = (rate.ticks_per_unit * units).round() as u64;
        let start = |empty: u64| now.max(empty.saturating_sub(rate.room));
        let pour = |empty: u64| Some(empty.max(start(empty)).saturating_add(cost));
        let before = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, pour);
        start(before.expect("`pour` always has an answer"))
    }

    /// Returns the tick at which the bucket will be empty.
    pub(super) fn empty_at(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set_empty_at(&self, tick: u64) {
        self.0.store(tick, Ordering::Relaxed);
    }

    /// Raises the level so that the bucket is not empty before `tick`.
    pub(super) fn raise(&self, tick: u64) {
        self.0.fetch_max(tick, Ordering::Relaxed);
    }

    pub(super) fn empty(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(super) fn fill(&self, rate: Rate, now: u64) {
        self.0.store(now + rate.room, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_and_a_burst_is_let_through() {
        let bucket = Bucket::default();
        let rate = Rate {
            ticks_per_unit: 10.0,
            room: 100,
        };
        // Eleven units at once (the bucket may be full before the last), then one every ten ticks.
        let starts: Vec<_> = (0..20).map(|_| bucket.reserve(rate, 1.0, 1000)).collect();
        let burst = starts.iter().filter(|start| **start == 1000).count();
        assert_eq!(burst, 11);
        assert_eq!(starts[11..14], [1010, 1020, 1030]);
        // A later caller loses nothing while there is room.
        assert_eq!(bucket.reserve(rate, 1.0, 1150), 1150);
        // After a long time the bucket is empty, and unused time beyond that gives no credit.
        let later = (0..20).map(|_| bucket.reserve(rate, 1.0, 9000));
        assert_eq!(later.filter(|start| *start == 9000).count(), 11);
        bucket.fill(rate, 20_000);
        let full: Vec<_> = (0..3).map(|_| bucket.reserve(rate, 1.0, 20_000)).collect();
        assert_eq!(full, [20_000, 20_010, 20_020]);
    }
}
