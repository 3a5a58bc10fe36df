//! Writes of a disk's file that have not ended.

use std::collections::VecDeque;

/// Writes and removals of one disk's file, and the steps that wait for them.
pub struct PendingWrites<S> {
    /// Number of writes and removals that have not ended.
    pub in_progress: usize,
    /// Steps that run afterwards, in this order.
    pub waiting: VecDeque<S>,
}

impl<S> Default for PendingWrites<S> {
    fn default() -> PendingWrites<S> {
        PendingWrites {
            in_progress: 0,
            waiting: VecDeque::new(),
        }
    }
}
