//! Decides when to retry after the remote has failed.

use std::time::{Duration, Instant};

pub struct Backoff {
    pub text: String,
    pause: Duration,
    until: Instant,
    /// Number of consecutive failures.
    pub times: u32,
}

const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl Backoff {
    pub fn new(text: String) -> Backoff {
        Backoff {
            text,
            pause: PAUSE.0,
            until: Instant::now() + PAUSE.0,
            times: 1,
        }
    }

    /// Records another failure and doubles the pause, up to its maximum.
    pub fn again(&mut self, text: String) {
        self.text = text;
        self.times += 1;
        self.pause = (2 * self.pause).min(PAUSE.1);
        self.until = Instant::now() + self.pause;
    }

    /// Returns the time until the next attempt; `None` if it is due.
    pub fn left(&self) -> Option<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}
