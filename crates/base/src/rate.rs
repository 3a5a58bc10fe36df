//! How much may be fetched before anybody asks for it.

use std::time::{Duration, Instant};

/// So many bytes a second, of which some may come at once.
pub struct Rate {
    rate: f64,
    most: f64,
    left: f64,
    since: Instant,
}

/// What may come at once is what comes in this time.
const BURST: f64 = 0.1;

impl Rate {
    /// `unit`: bytes that are fetched at once. 0 bytes a second: nothing.
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

    /// When more may come; none: it may, or never may.
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
