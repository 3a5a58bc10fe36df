//! Signals the end of a disk to threads that wait.

use std::sync::{Condvar, Mutex};
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
        *self.is_over.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for `pause`. Returns false if the disk has ended.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let guard = self.is_over.lock().unwrap_or_else(|e| e.into_inner());
        let waited = self.ended.wait_timeout_while(guard, pause, |over| !*over);
        !*waited.unwrap_or_else(|e| e.into_inner()).0
    }
}
