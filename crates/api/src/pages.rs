//! How pages of metrics are made, and how many at the same time.

use fathom_metrics::Scale;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Pages that are made and sent at the same time: each has all that is counted then.
pub const PAGES: usize = 4;

/// How pages are made.
#[derive(Clone)]
pub struct Pages {
    pub scale: Arc<Scale>,
    pub turns: Arc<Semaphore>,
}

impl Pages {
    pub fn new(scale: Arc<Scale>) -> Pages {
        let turns = Arc::new(Semaphore::new(PAGES));
        Pages { scale, turns }
    }
}
