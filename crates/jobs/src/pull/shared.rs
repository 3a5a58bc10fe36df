//! State shared by the thread of a pull and by the threads that control it.

use super::terms::Status;
use crate::copy::Rate;
use fathom_storage::{ChangesClient, Halt, NbdDisk};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;

#[derive(Default)]
pub(super) struct Shared {
    /// Limit of the copying speed.
    pub(super) rate: Arc<Rate>,
    state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Close the connections to the other server: for changes, and for data.
    halts: Mutex<[Option<Halt>; 2]>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) status: Status,
    /// Whether a local guest wants the disk.
    pub(super) wanted: bool,
    pub(super) stop: bool,
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits for `time`, or until the job must stop or `is_news` returns true.
    pub(super) fn pause(&self, time: Duration, is_news: impl Fn(&State) -> bool) {
        let idle = |state: &mut State| !state.stop && !is_news(state);
        self.changed.wait_while_for(&mut self.state(), idle, time);
    }

    /// Wakes a thread in [`Shared::pause`], which checks its condition again.
    pub(super) fn wake(&self) {
        // Taking the lock makes sure that a thread which has just checked is already waiting.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Registers the connection for changes, on whose replies the job waits from now on.
    pub(super) fn asks_for_changes(&self, client: &ChangesClient) {
        self.halts.lock()[0] = Some(client.halt());
    }

    /// Registers the connection for data, on whose replies the job waits from now on.
    pub(super) fn asks_for_data(&self, disk: &NbdDisk) {
        self.halts.lock()[1] = Some(disk.halt());
    }

    /// Makes all requests to the other server fail.
    pub(super) fn give_source_up(&self) {
        self.halts.lock().iter().flatten().for_each(|halt| halt());
    }

    pub(super) fn stops(&self) -> bool {
        self.state().stop
    }
}
