//! Limits how many pages of metrics are made at the same time.

use fathom_metrics::Scale;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Maximum number of pages that are made and sent at the same time. Each has a copy of all
/// counters.
pub const PAGES: usize = 4;

/// The scale of metrics, and the permits to make a page.
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
