//! State shared by the thread of a job that follows a disk and by the threads that control the job.

use crate::copy::Rate;
use crate::source::InUse;
use fathom_core::{Disk, DiskError};
use fathom_stack::Job;
use fathom_storage::Halt;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The phase of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The job copies the existing data, then again what users have changed meanwhile.
    #[default]
    Copying,
    /// The remaining data takes no longer to copy than users can wait.
    Ready,
    /// The virtual machine has disconnected from the disk, which other programs may use now.
    ///
    /// The job resumes when the disk can be used again and no other program has changed it.
    Waiting,
    /// The job must stop, and waits for its requests in flight.
    Stopping,
    /// Both disks were identical when the job released them.
    Done,
    /// The job failed; the copy is unusable.
    Failed,
}

impl Phase {
    /// Returns the name of the phase, as events and the API show it.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Copying => "copying",
            Phase::Ready => "ready",
            Phase::Waiting => "waiting",
            Phase::Stopping => "stopping",
            Phase::Done => "done",
            Phase::Failed => "failed",
        }
    }

    /// Returns whether the job has ended. An ended job has released both disks, or is about to.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Done | Phase::Failed)
    }
}

/// Why a pass over the disk has ended.
#[derive(PartialEq, Eq)]
pub(crate) enum Gone {
    /// The virtual machine disconnects from the disk.
    Away,
    /// The pass has completed all its work.
    Done,
}

/// Progress of a job that follows a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The phase of the job.
    pub phase: Phase,
    /// Number of bytes copied; ranges copied several times count each time.
    pub copied: u64,
    /// Estimated number of bytes still to be copied.
    pub left: u64,
    /// Why the copy is unusable.
    pub problem: Option<String>,
}

/// Callback for each change of phase, called on the job's thread, or on the thread that abandons
/// the job.
pub type Tell = Arc<dyn Fn(Phase, Option<&str>) + Send + Sync>;

/// A handle to a running job.
#[derive(Clone)]
pub struct Following {
    pub(crate) shared: Arc<Shared>,
}

impl Following {
    /// Returns the progress of the job. A job that must stop and has not ended is in `Stopping`.
    pub fn status(&self) -> Status {
        let state = self.shared.state();
        let mut status = state.status.clone();
        if state.order == Order::Stop && !status.phase.is_over() {
            status.phase = Phase::Stopping;
        }
        status
    }

    /// Returns whether the job has released all disks.
    pub fn is_over(&self) -> bool {
        self.shared.state().is_over
    }

    /// Returns the limit in bytes per second. `None` means no limit.
    pub fn rate(&self) -> Option<u64> {
        self.shared.rate.limit()
    }

    /// Sets the limit in bytes per second. The limit applies to the next piece that is copied.
    pub fn set_rate(&self, limit: Option<u64>) {
        self.shared.rate.set(limit);
    }

    /// Tells the job to release the disk, because the disk's virtual machine disconnects.
    ///
    /// Does not wait. The caller repeats the call until the job has released the disk.
    pub fn leave(&self) {
        self.shared.leave();
    }

    /// Tells the job to stop. Does not wait for its end.
    pub fn begin_stop(&self) {
        self.shared.change(|state| state.order = Order::Stop);
    }

    /// Ends the job. A job whose target does not respond is abandoned: its requests fail, or its
    /// thread is left behind. Returns false if the job still uses a disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.end_while(deadline, |_| true)
    }

    /// Ends the job like [`Following::end`], but does not wait for storage that is stuck.
    ///
    /// Returns false as soon as storage that the job must wait for has not replied for a second.
    /// The job ends later, when that storage has replied.
    pub fn end_unless_stuck(&self, deadline: Instant) -> bool {
        self.end_while(deadline, |answered| answered > 0)
    }

    /// Ends the job and waits for it while `waits` returns true.
    ///
    /// `waits` is called each second with the number of requests completed since the last call.
    fn end_while(&self, deadline: Instant, waits: impl Fn(u64) -> bool) -> bool {
        self.begin_stop();
        let soon = || deadline.min(Instant::now() + ORDERLY_END);
        let shared = &self.shared;
        if shared.wait(soon()) || shared.give_target_up() && shared.wait(soon()) {
            return true;
        }
        loop {
            let before = shared.answered.load(Ordering::Relaxed);
            if shared.abandon() || shared.wait(soon()) {
                return true;
            }
            let answered = shared.answered.load(Ordering::Relaxed) - before;
            if Instant::now() >= deadline || !waits(answered) {
                return false;
            }
        }
    }
}

/// How a job whose target does not respond can end.
struct Abandoning {
    /// Makes all requests to the target fail.
    halt: Option<Halt>,
    /// Undoes, for the disk's users, what the job's thread would undo at its end.
    release: Option<Release>,
    /// The reason reported to the user when the job is abandoned.
    problem: &'static str,
}

/// Callback that releases the disk's users; called once.
pub(crate) type Release = Box<dyn FnOnce() + Send>;

pub(crate) struct Shared {
    tell: Tell,
    /// Limit of the copying speed.
    pub(crate) rate: Arc<Rate>,
    abandoning: Mutex<Option<Abandoning>>,
    /// Whether the job writes to the images of the disk itself.
    ///
    /// If so, the job keeps the disk until no write is in flight, however long that takes. Other
    /// users that wait for the disk need the same files.
    writes: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// Number of the job's requests that disks have completed.
    answered: Arc<AtomicU64>,
    /// The source disk, while the job uses it.
    held: Mutex<Option<InUse>>,
}

/// Reason for the failure of a job that did not release the disk in time.
const LATE: &str = "the target did not respond when the virtual machine disconnected";

/// Reason for the failure of a job whose thread was abandoned while it writes to its target.
pub(crate) const ABANDONED: &str =
    "ended while the target did not respond; writes to the target may still complete";

/// Time that a job has to end by itself.
///
/// The time starts again once its target's requests fail, and for each further reply.
const ORDERLY_END: Duration = Duration::from_secs(1);

/// Reason for the failure of a job that was stopped by a user.
pub(crate) const STOPPED: &str = "ended before all data was copied";

/// Interval between attempts to use the disk again.
const AWAY: Duration = Duration::from_millis(200);

/// Maximum time that a disconnecting virtual machine waits for the job to release the disk:
/// normally, and while the job copies the remaining data.
const LEAVING: Duration = Duration::from_secs(1);
const FINISHING: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(crate) struct State {
    pub(crate) status: Status,
    order: Order,
    /// When the virtual machine began to disconnect from the disk, which the job must then release.
    ///
    /// The virtual machine has no requests in flight then.
    leaving: Option<Instant>,
    /// Whether the job has released both disks.
    is_over: bool,
}

/// The order that the job has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    /// Follow the disk.
    #[default]
    Follow,
    /// Follow the disk; copy the remaining data and end when the virtual machine disconnects.
    FinishOnLeave,
    /// Copy the remaining data and end: no user changes the disk any more.
    Finish,
    /// End: the copy is not wanted any more.
    Stop,
}

/// The next step of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Copy,
    /// Copy the remaining data, which no user changes any more.
    CopyLast,
    /// Release the disk without copying the remaining data.
    Leave,
    Stop,
}

impl State {
    pub(crate) fn next(&self) -> Next {
        match (self.order, self.leaving) {
            (Order::Stop, _) => Next::Stop,
            (Order::Finish, _) | (Order::FinishOnLeave, Some(_)) => Next::CopyLast,
            (Order::Follow, Some(_)) => Next::Leave,
            (Order::Follow | Order::FinishOnLeave, None) => Next::Copy,
        }
    }
}

impl Shared {
    pub(crate) fn new(writes: bool, rate: Option<u64>, tell: &Tell) -> Arc<Shared> {
        Arc::new(Shared {
            tell: tell.clone(),
            rate: Rate::new(rate),
            abandoning: Mutex::default(),
            writes,
            state: Mutex::default(),
            changed: Condvar::new(),
            answered: Arc::default(),
            held: Mutex::default(),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Tells the job to copy the remaining data and end.
    ///
    /// `now`: immediately, because no user changes the disk any more; otherwise when the virtual
    /// machine disconnects.
    pub(crate) fn finish(&self, now: bool) {
        self.change(|state| {
            state.order = match (state.order, now) {
                (Order::Stop, _) => Order::Stop,
                (Order::Finish, _) | (_, true) => Order::Finish,
                (Order::Follow | Order::FinishOnLeave, false) => Order::FinishOnLeave,
            };
        });
    }

    /// Returns whether the pass over the disk must end although it has not completed its work.
    pub(crate) fn ends_pass(&self) -> bool {
        matches!(self.state().next(), Next::Stop | Next::Leave)
    }

    /// Cancels [`Shared::finish`].
    pub(crate) fn go_on(&self) {
        self.change(|state| {
            if state.order != Order::Stop {
                state.order = Order::Follow;
            }
        });
    }

    /// Returns a new [`Job`] whose replies are counted.
    pub(crate) fn job(&self) -> Job {
        Job::counted_by(self.answered.clone())
    }

    /// Activates the disk and holds it from now on.
    pub(crate) fn take(&self, disk: &Arc<dyn Disk>) -> Result<(), DiskError> {
        self.change(|state| state.leaving = None);
        *self.held.lock() = Some(InUse::new(disk)?);
        Ok(())
    }

    /// Releases the disk.
    pub(crate) fn let_go(&self) {
        // The deactivation runs without the lock, since other threads ask for `held` meanwhile.
        let held = self.held.lock().take();
        drop(held);
    }

    /// Tells the job to release the disk. The caller repeats the call until the disk is free.
    ///
    /// A job that reads the disk only is not waited for if it hangs: it fails, and the disk is
    /// released at once.
    pub(crate) fn leave(&self) {
        let mut late = false;
        self.change(|state| {
            let since = *state.leaving.get_or_insert_with(Instant::now);
            let patience = match state.next() {
                Next::CopyLast => FINISHING,
                Next::Copy | Next::Leave | Next::Stop => LEAVING,
            };
            late = !self.writes && since.elapsed() > patience;
            if late && !state.is_over {
                state.order = Order::Stop;
                state.status.phase = Phase::Failed;
                let problem = &mut state.status.problem;
                problem.get_or_insert_with(|| LATE.into());
            }
        });
        if late {
            self.let_go();
        }
    }

    /// Allows the job to be ended although its target does not respond.
    ///
    /// `halt` makes the target's requests fail, if possible. `release` undoes what the job does to
    /// the disk's users. The job then fails with `problem`.
    pub(crate) fn can_be_abandoned(
        &self,
        halt: Option<Halt>,
        release: Release,
        problem: &'static str,
    ) {
        *self.abandoning.lock() = Some(Abandoning {
            halt,
            release: Some(release),
            problem,
        });
    }

    /// Makes all requests to the target fail. Returns false if that is impossible.
    fn give_target_up(&self) -> bool {
        let abandoning = self.abandoning.lock();
        let halt = abandoning.as_ref().and_then(|how| how.halt.as_ref());
        halt.map(|halt| halt()).is_some()
    }

    /// Abandons the thread, which waits for the target, and releases the disk.
    ///
    /// Returns false if that is impossible.
    fn abandon(&self) -> bool {
        let (release, problem) = match &mut *self.abandoning.lock() {
            Some(how) => (how.release.take(), how.problem),
            None => return false,
        };
        let mut was_over = true;
        self.change(|state| {
            was_over = std::mem::replace(&mut state.is_over, true);
            if !was_over {
                state.status.phase = Phase::Failed;
                let problems = &mut state.status.problem;
                problems.get_or_insert_with(|| problem.into());
            }
        });
        if !was_over {
            release.into_iter().for_each(|release| release());
            self.let_go();
            let problem = self.state().status.problem.clone();
            (self.tell)(Phase::Failed, problem.as_deref());
        }
        true
    }

    /// Waits until the disk can be used again after its virtual machine disconnected, and uses it.
    ///
    /// The error is a message for the user.
    fn wait_for(&self, disk: &Arc<dyn Disk>) -> Result<(), String> {
        loop {
            let problem = match self.take(disk) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            self.pause(AWAY);
            match self.state().next() {
                Next::Stop => return Err(STOPPED.into()),
                Next::CopyLast => return Err(problem.to_string()),
                Next::Copy | Next::Leave => {}
            }
        }
    }

    /// Repeats `pass` until it is done, across disconnections of the disk's virtual machine.
    ///
    /// The error is a message for the user.
    pub(crate) fn work_on(
        &self,
        disk: &Arc<dyn Disk>,
        tell: &Tell,
        mut pass: impl FnMut() -> Result<Gone, String>,
    ) -> Result<(), String> {
        while pass()? == Gone::Away {
            self.enter(Phase::Waiting, tell);
            self.let_go();
            self.wait_for(disk)?;
            self.enter(Phase::Copying, tell);
        }
        Ok(())
    }

    /// Records the outcome of the job. The job has released everything but the disk by then.
    pub(crate) fn conclude(&self, outcome: Result<(), String>, tell: &Tell) {
        if self.state().is_over {
            // The job was abandoned, and another job may use the disk by now.
            return;
        }
        let problem = outcome.err();
        let is_late = self.state().status.phase.is_over();
        let phase = match problem.is_some() || is_late {
            false => Phase::Done,
            true => Phase::Failed,
        };
        self.end(phase, problem, tell);
        // The phase is final before the disk is released, because waiters read the outcome then.
        self.let_go();
        self.change(|state| state.is_over = true);
    }

    /// Enters a phase, unless the job is over, and reports it to `tell`.
    pub(crate) fn enter(&self, phase: Phase, tell: &Tell) {
        {
            let status = &mut self.state().status;
            if status.phase == phase || status.phase.is_over() {
                return;
            }
            status.phase = phase;
        }
        tell(phase, None);
    }

    /// Enters the final phase.
    fn end(&self, phase: Phase, problem: Option<String>, tell: &Tell) {
        let problem = {
            let status = &mut self.state().status;
            // An earlier problem takes precedence.
            status.problem = status.problem.take().or(problem);
            status.phase = phase;
            status.problem.clone()
        };
        tell(phase, problem.as_deref());
    }

    /// Waits for `time`, or until the job must stop, leave the disk or copy the last data.
    pub(crate) fn pause(&self, time: Duration) {
        let idle = |state: &mut State| state.next() == Next::Copy;
        self.changed.wait_while_for(&mut self.state(), idle, time);
    }

    /// Waits until the job is over. Returns false if it is not over at `deadline`.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits = |state: &mut State| !state.is_over;
        let mut state = self.state();
        self.changed.wait_while_for(&mut state, waits, left);
        state.is_over
    }
}
