//! Jobs that follow a disk: what their thread and the others know of them.

use crate::copy::Rate;
use crate::source::InUse;
use fathom_core::{Disk, DiskError};
use fathom_stack::Job;
use fathom_storage::Halt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// What there is is copied, and what users have changed meanwhile again.
    #[default]
    Copying,
    /// What is left takes no longer than users can wait.
    Ready,
    /// Its virtual machine has let go of the disk, which others may have now. When it is back, and nobody has changed
    /// anything, this goes on.
    Waiting,
    /// The job has been ended, and waits for the requests that it has in flight.
    Stopping,
    /// Both were the same, when this had let go of them.
    Done,
    /// The copy is of no use.
    Failed,
}

impl Phase {
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

    /// It has let go of both disks, or is about to.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Done | Phase::Failed)
    }
}

/// Why a pass over the disk has ended.
#[derive(PartialEq, Eq)]
pub(crate) enum Gone {
    /// The virtual machine lets go of the disk.
    Away,
    /// All of it is done.
    Done,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub phase: Phase,
    /// Bytes that have been copied, some of them several times.
    pub copied: u64,
    /// Bytes that are still to be copied, as far as is known.
    pub left: u64,
    /// Why the copy is of no use.
    pub problem: Option<String>,
}

/// Hears of each change of phase, on the job's thread.
pub type Tell = Arc<dyn Fn(Phase, Option<&str>) + Send + Sync>;

/// One that has begun, for whoever started it.
#[derive(Clone)]
pub struct Following {
    pub(crate) shared: Arc<Shared>,
}

impl Following {
    pub fn status(&self) -> Status {
        let state = self.shared.state();
        let mut status = state.status.clone();
        if state.stop && !status.phase.is_over() {
            status.phase = Phase::Stopping;
        }
        status
    }

    /// It has let go of all disks.
    pub fn is_over(&self) -> bool {
        self.shared.state().is_over
    }

    /// How many bytes it may copy per second. `None`: as many as it can.
    pub fn rate(&self) -> Option<u64> {
        self.shared.rate.limit()
    }

    /// Sets that limit. It applies to the next piece that is copied.
    pub fn set_rate(&self, limit: Option<u64>) {
        self.shared.rate.set(limit);
    }

    /// The disk's virtual machine lets go of it, and this must, too; to be asked again until it has. Does not wait.
    pub fn leave(&self) {
        self.shared.leave();
    }

    /// It is not wanted any more; does not wait for it.
    pub fn begin_stop(&self) {
        self.shared.change(|state| state.stop = true);
    }

    /// Ends the job. A job whose target does not answer is given up: its requests fail, or its thread is left behind.
    /// Returns false if the job still uses a disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.end_while(deadline, |_| true)
    }

    /// Ends the job like [`Following::end`], but returns false as soon as storage that the job must wait for has answered
    /// nothing for a second. The job ends later, when that storage has answered.
    pub fn end_unless_stuck(&self, deadline: Instant) -> bool {
        self.end_while(deadline, |answered| answered > 0)
    }

    /// Waits while `waits` says so, which is called each second with the number of requests that were answered since.
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

/// How a job whose target does not answer can end.
struct Abandoning {
    /// Has the target's requests fail.
    halt: Option<Halt>,
    /// Undoes for the users of the disk what the job's thread has not undone.
    release: Option<Release>,
    /// Why the job has failed then, for the user.
    problem: &'static str,
}

/// Called once.
pub(crate) type Release = Box<dyn FnOnce() + Send>;

pub(crate) struct Shared {
    tell: Tell,
    /// How fast it may copy.
    pub(crate) rate: Arc<Rate>,
    abandoning: Mutex<Option<Abandoning>>,
    /// It writes to what the disk is in: the disk is let go of when nothing of that is in flight any more, however long it
    /// takes. (Whoever waits for that waits for the same files.)
    writes: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// Number of the job's requests that disks have answered.
    answered: Arc<AtomicU64>,
    /// The disk that is copied, while this uses it.
    held: Mutex<Option<InUse>>,
}

/// Why it has failed then.
const LATE: &str = "the target did not respond when the virtual machine disconnected";

/// Why a job that writes to its target has failed when its thread was left behind.
pub(crate) const ABANDONED: &str =
    "ended while the target did not respond; writes to the target may still complete";

/// Time that a job has to end by itself, again once the requests of its target fail, and again for each further answer.
const ORDERLY_END: Duration = Duration::from_secs(1);

/// What is said of one that somebody has ended.
pub(crate) const STOPPED: &str = "ended before all data was copied";

/// Between attempts to have the disk again.
const AWAY: Duration = Duration::from_millis(200);

/// The disk's virtual machine waits for so long at most; and so long if what is left is copied meanwhile.
const LEAVING: Duration = Duration::from_secs(1);
const FINISHING: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(crate) struct State {
    pub(crate) status: Status,
    /// The copy is not wanted any more.
    pub(crate) stop: bool,
    /// The disk is to be let go of: its virtual machine does so, and nothing of it is in flight.
    pub(crate) leave: bool,
    /// Since when.
    since: Option<Instant>,
    /// The rest is to be copied as soon as nobody changes anything any more.
    pub(crate) finish: bool,
    /// Nobody does.
    pub(crate) halted: bool,
    /// It has let go of both disks.
    is_over: bool,
}

impl State {
    /// What is copied now is the rest.
    pub(crate) fn is_last(&self) -> bool {
        self.finish && (self.leave || self.halted)
    }

    /// The disk is to be let go of as it is.
    pub(crate) fn leaves(&self) -> bool {
        self.leave && !self.finish
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// A job whose answers are counted.
    pub(crate) fn job(&self) -> Job {
        Job::counted_by(self.answered.clone())
    }

    fn held(&self) -> MutexGuard<'_, Option<InUse>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses that disk from now on.
    pub(crate) fn take(&self, disk: &Arc<dyn Disk>) -> Result<(), DiskError> {
        self.change(|state| (state.leave, state.since) = (false, None));
        *self.held() = Some(InUse::new(disk)?);
        Ok(())
    }

    /// Does no more.
    pub(crate) fn let_go(&self) {
        // (Others wait for that, who are asked for it.)
        let held = self.held().take();
        drop(held);
    }

    /// Has the disk let go of, on behalf of one who asks again until it is. What hangs is not waited for: the copy is
    /// of no use then.
    pub(crate) fn leave(&self) {
        let mut late = false;
        self.change(|state| {
            state.leave = true;
            let since = *state.since.get_or_insert_with(Instant::now);
            let patience = if state.finish { FINISHING } else { LEAVING };
            late = !self.writes && since.elapsed() > patience;
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

    /// The job may be ended although its target does not answer: `halt` has the target's requests fail, if that is
    /// possible, and `release` undoes what the job does to the disk's users. Then the job has failed by that `problem`.
    pub(crate) fn can_be_abandoned(
        &self,
        halt: Option<Halt>,
        release: Release,
        problem: &'static str,
    ) {
        *self.abandoning() = Some(Abandoning {
            halt,
            release: Some(release),
            problem,
        });
    }

    fn abandoning(&self) -> MutexGuard<'_, Option<Abandoning>> {
        let lock = self.abandoning.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all requests of the target fail. False: that is not possible.
    fn give_target_up(&self) -> bool {
        let abandoning = self.abandoning();
        let halt = abandoning.as_ref().and_then(|how| how.halt.as_ref());
        halt.map(|halt| halt()).is_some()
    }

    /// Leaves the thread behind, which waits for the target, and lets go of the disk. False: that is not possible.
    fn abandon(&self) -> bool {
        let (release, problem) = match &mut *self.abandoning() {
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

    /// Its virtual machine has let go of the disk: waits until that is back, and uses the disk again. The error is for the
    /// user.
    fn wait_for(&self, disk: &Arc<dyn Disk>) -> Result<(), String> {
        loop {
            let problem = match self.take(disk) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            self.pause(AWAY);
            let state = self.state();
            if state.stop {
                return Err(STOPPED.into());
            }
            if state.is_last() {
                return Err(problem.to_string());
            }
        }
    }

    /// Has `pass` work on the disk until all is done, whoever comes and goes. The error is for the user.
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

    /// It is over, and has let go of all but the disk.
    pub(crate) fn conclude(&self, outcome: Result<(), String>, tell: &Tell) {
        if self.state().is_over {
            // It was abandoned, and somebody else may work on the disk by now.
            return;
        }
        let problem = outcome.err();
        let is_late = self.state().status.phase.is_over();
        let phase = match problem.is_some() || is_late {
            false => Phase::Done,
            true => Phase::Failed,
        };
        self.end(phase, problem, tell);
        // (Whoever waits for that goes on with what has come of it.)
        self.let_go();
        self.change(|state| state.is_over = true);
    }

    /// It is in that phase from now on, unless it is over; `tell` hears of it.
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

    /// It has ended in that phase.
    fn end(&self, phase: Phase, problem: Option<String>, tell: &Tell) {
        let problem = {
            let status = &mut self.state().status;
            // (It may have failed before.)
            status.problem = status.problem.take().or(problem);
            status.phase = phase;
            status.problem.clone()
        };
        tell(phase, problem.as_deref());
    }

    /// Waits until that time is over, or there is something to be looked at.
    pub(crate) fn pause(&self, time: Duration) {
        let idle = |state: &mut State| !state.stop && !state.leave && !state.is_last();
        drop(self.changed.wait_timeout_while(self.state(), time, idle));
    }

    /// Waits until `deadline` for it to be over. False: it is not.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits = |state: &mut State| !state.is_over;
        let waited = self.changed.wait_timeout_while(self.state(), left, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_over
    }
}
