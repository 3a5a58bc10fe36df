//! What the thread and the others know of a mirror.

use super::terms::{Phase, Status};
use crate::source::InUse;
use fathom_core::{Disk, DiskError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// The disk that is copied, while this uses it.
    held: Mutex<Option<InUse>>,
}

/// Why it has failed then.
const LATE: &str = "its target did not answer while its virtual machine let go of the disk";

/// The disk's virtual machine waits for so long at most; and so long if what is left is copied meanwhile.
const LEAVING: Duration = Duration::from_secs(1);
const FINISHING: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct State {
    pub(super) status: Status,
    /// The copy is not wanted any more.
    pub(super) stop: bool,
    /// The disk is to be let go of: its virtual machine does so, and nothing of it is in flight.
    pub(super) leave: bool,
    /// Since when.
    since: Option<Instant>,
    /// The rest is to be copied as soon as nobody changes anything any more.
    pub(super) finish: bool,
    /// Nobody does.
    pub(super) halted: bool,
    /// It has let go of both disks.
    pub(super) is_over: bool,
}

impl State {
    /// What is copied now is the rest.
    pub(super) fn is_last(&self) -> bool {
        self.finish && (self.leave || self.halted)
    }

    /// The disk is to be let go of as it is.
    pub(super) fn leaves(&self) -> bool {
        self.leave && !self.finish
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn held(&self) -> MutexGuard<'_, Option<InUse>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses that disk from now on.
    pub(super) fn take(&self, disk: &Arc<dyn Disk>) -> Result<(), DiskError> {
        self.change(|state| (state.leave, state.since) = (false, None));
        *self.held() = Some(InUse::new(disk)?);
        Ok(())
    }

    /// Does no more.
    pub(super) fn let_go(&self) {
        // (Others wait for that, who are asked for it.)
        let held = self.held().take();
        drop(held);
    }

    /// Has the disk let go of, on behalf of one who asks again until it is. What hangs is not waited for: the copy is
    /// of no use then.
    pub(super) fn leave(&self) {
        let mut late = false;
        self.change(|state| {
            state.leave = true;
            let since = *state.since.get_or_insert_with(Instant::now);
            let patience = if state.finish { FINISHING } else { LEAVING };
            late = since.elapsed() > patience;
            if late && !state.is_over {
                state.stop = true;
                state.status.phase = Phase::Failed;
                let problem = &mut state.status.problem;
                problem.get_or_insert_with(|| LATE.into());
            }
        });
        if late {
            self.let_go();
        }
    }

    /// Waits until that time is over, or there is something to be looked at.
    pub(super) fn pause(&self, time: Duration) {
        let idle = |state: &mut State| !state.stop && !state.leave && !state.is_last();
        drop(self.changed.wait_timeout_while(self.state(), time, idle));
    }

    /// Waits until `deadline` for it to be over. False: it is not.
    pub(super) fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits = |state: &mut State| !state.is_over;
        let waited = self.changed.wait_timeout_while(self.state(), left, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_over
    }
}
