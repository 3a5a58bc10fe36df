//! The end of a disk, for threads that wait meanwhile.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Ends the search when the disk is gone.
#[derive(Default)]
pub(super) struct Halt {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Halt {
    /// Nobody needs the server any more.
    pub(super) fn halt(&self) {
        *self.is_over.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// False: it is over.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let guard = self.is_over.lock().unwrap_or_else(|e| e.into_inner());
        let waited = self.ended.wait_timeout_while(guard, pause, |over| !*over);
        !*waited.unwrap_or_else(|e| e.into_inner()).0
    }
}
