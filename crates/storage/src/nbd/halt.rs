//! Signals the end of a disk to threads that wait.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Flag that ends the reconnection when the disk is gone.
#[derive(Default)]
pub(super) struct Halt {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Halt {
    /// Sets the flag and wakes all waiting threads.
    pub(super) fn halt(&self) {
        *self.is_over.lock() = true;
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.lock()
    }

    /// Waits for `pause`. Returns false if the disk has ended.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        self.ended
            .wait_while_for(&mut is_over, |over| !*over, pause);
        !*is_over
    }
}
