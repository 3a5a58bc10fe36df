//! What the thread and the others know of a disk's way here.

use super::terms::Status;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) status: Status,
    /// A guest is here and wants the disk.
    pub(super) wanted: bool,
    pub(super) stop: bool,
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until that time is over, or there is something to be looked at.
    pub(super) fn pause(&self, time: Duration, is_news: impl Fn(&State) -> bool) {
        let idle = |state: &mut State| !state.stop && !is_news(state);
        drop(self.changed.wait_timeout_while(self.state(), time, idle));
    }

    /// Has whoever [pauses](Shared::pause) look again.
    pub(super) fn wake(&self) {
        // (Whoever holds the lock has looked, and does not wait yet.)
        drop(self.state());
        self.changed.notify_all();
    }

    pub(super) fn stops(&self) -> bool {
        self.state().stop
    }
}
