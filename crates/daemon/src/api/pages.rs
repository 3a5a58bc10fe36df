//! How pages of metrics are made, and how many at the same time.

use crate::metrics::Scale;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Pages that are made or sent at the same time: each may have tens of megabytes.
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
