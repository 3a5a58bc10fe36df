//! What the thread and the others know of a disk's way here.

use super::terms::Status;
use crate::copy::Rate;
use fathom_storage::{ChangesClient, Halt, NbdDisk};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Shared {
    /// Limit of what is copied.
    pub(super) rate: Arc<Rate>,
    state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Gives up the connections to the other server: that of changes, and those of data.
    halts: Mutex<[Option<Halt>; 2]>,
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

    /// The job waits for answers on this connection from now on.
    pub(super) fn asks_for_changes(&self, client: &ChangesClient) {
        self.halts()[0] = Some(client.halt());
    }

    /// The job waits for answers of this disk from now on.
    pub(super) fn asks_for_data(&self, disk: &NbdDisk) {
        self.halts()[1] = Some(disk.halt());
    }

    /// Has all that fail which the job waits for.
    pub(super) fn give_source_up(&self) {
        self.halts().iter().flatten().for_each(|halt| halt());
    }

    fn halts(&self) -> MutexGuard<'_, [Option<Halt>; 2]> {
        self.halts.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn stops(&self) -> bool {
        self.state().stop
    }
}
