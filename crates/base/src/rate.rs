//! Limits the rate of prefetching.

use std::time::{Duration, Instant};

/// A token bucket in bytes.
pub struct Rate {
    rate: f64,
    most: f64,
    left: f64,
    since: Instant,
}

/// Size of a burst, in seconds at the full rate.
const BURST: f64 = 0.1;

impl Rate {
    /// Creates a limit of `rate` bytes per second; 0 forbids prefetching.
    ///
    /// `unit` is the number of bytes that are fetched at a time, and the minimum size of a burst.
    pub fn new(rate: u64, unit: u64) -> Rate {
        let most = (rate as f64 * BURST).max(unit as f64);
        Rate {
            rate: rate as f64,
            most,
            left: most,
            since: Instant::now(),
        }
    }

    fn refill(&mut self) {
        let now = Instant::now();
        self.left += self.rate * now.duration_since(self.since).as_secs_f64();
        self.left = self.left.min(self.most);
        self.since = now;
    }

    pub fn may(&mut self) -> bool {
        self.refill();
        self.rate > 0.0 && self.left > 0.0
    }

    pub fn take(&mut self, bytes: u64) {
        self.left -= bytes as f64;
    }

    /// Returns the time until more may be fetched; `None` if it is now, or never.
    pub fn until(&mut self) -> Option<Duration> {
        self.refill();
        let wait = -self.left / self.rate;
        (self.rate > 0.0 && wait >= 0.0)
            .then(|| Duration::from_secs_f64(wait) + Duration::from_millis(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_again_with_time() {
        let mut rate = Rate::new(1000, 100);
        assert!(rate.may() && rate.until().is_none());
        rate.take(10_000_000);
        assert!(!rate.may());
        assert!(rate.until().unwrap() > Duration::from_secs(9000));
        rate.since -= Duration::from_secs(9_999);
        assert!(!rate.may());
        rate.since -= Duration::from_secs(9_999);
        assert!(rate.may());
        let mut off = Rate::new(0, 100);
        assert!(!off.may() && off.until().is_none());
    }
}
