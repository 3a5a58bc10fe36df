//! The thread that pulls a disk.

use super::record::Record;
use super::shared::Shared;
use super::source::{self, Todo};
use super::terms::{Phase, Terms};
use crate::copy::{Copy, Failure, Pace, Speed};
use fathom_core::{Disk, DiskError, WorkerHandle};
use fathom_stack::{Client, Job, Latch, Missing};
use fathom_storage::{ChangesClient, EngineKind};
use fathom_units::cause;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a guest can wait: remaining data that takes less does not prevent the move.
const SHORT: Duration = Duration::from_millis(200);

/// Time to wait after a failure: initially, and at most after doubling.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(super) const LAST_PAUSE: Duration = Duration::from_secs(10);

/// Interval between queries for changes while data is copied.
const SLICE: Duration = Duration::from_millis(250);

/// Interval between queries for changes while all data is copied.
pub(super) const IDLE: Duration = Duration::from_millis(100);
/// Interval between queries whether the guest has stopped there, while a local guest waits.
pub(super) const IMPATIENT: Duration = Duration::from_millis(2);

/// The destination of a pull.
pub struct Target {
    /// The disk to which data is written; the job activates it.
    pub disk: Arc<dyn Disk>,
    /// Engine of the job's own requests to the disk.
    pub engine: EngineKind,
    /// Latch of the workers' requests, opened for the guest when all data is here.
    pub latch: Latch,
    /// The blocks that are still missing after the latch is opened.
    pub missing: Arc<Missing>,
    /// Workers that serve the disk's guest; the job notifies them of changes to the latch.
    pub workers: Arc<[WorkerHandle]>,
}

/// Callback for each change of phase.
pub type Tell = Box<dyn Fn(Phase) + Send>;

/// The state of the thread that pulls a disk.
pub(super) struct Puller {
    pub(super) terms: Terms,
    pub(super) record: Record,
    pub(super) shared: Arc<Shared>,
    todo: Todo,
    /// Offset in bytes where copying continues.
    cursor: u64,
    /// Whether the disk has been taken over: nothing changes on the other server any more.
    taken: bool,
    /// Whether a takeover was requested and its outcome is unknown.
    asked: bool,
    /// The last problem that was logged.
    told: Option<String>,
    /// The connection for changes that was opened before, if it still works.
    pub(super) client: Option<ChangesClient>,
    tell: Tell,
}

impl Puller {
    /// Creates a puller. `begun`: the data to copy, and a client whose server knows of this move.
    pub(super) fn new(
        terms: Terms,
        record: Record,
        shared: Arc<Shared>,
        begun: (Todo, Option<ChangesClient>),
        tell: Tell,
    ) -> Puller {
        let (todo, client) = begun;
        Puller {
            terms,
            record,
            shared,
            todo,
            cursor: 0,
            taken: false,
            asked: false,
            told: None,
            client,
            tell,
        }
    }

    /// Pulls the disk and returns its record, or `None` if the job must stop.
    pub(super) fn run(mut self, target: &Target) -> Option<Record> {
        self.insist(|_| target.disk.activate())?;
        let is_over = |puller: &Puller| puller.shared.stops();
        let is_here = self.try_again_and_again(is_over, |puller| puller.pull(target));
        if !is_here {
            if let Err(error) = target.disk.deactivate() {
                tracing::error!("{error}");
            }
            return None;
        }
        // Deactivate first: the guest that waits must see what was written.
        self.insist(|_| target.disk.deactivate())?;
        target.latch.open(&target.workers);
        self.enter(Phase::Done);
        Some(self.record)
    }

    /// Retries `act` until it succeeds. Returns `None` if the job must stop.
    pub(super) fn insist(&mut self, act: impl Fn(&Puller) -> Result<(), DiskError>) -> Option<()> {
        let mut pause = FIRST_PAUSE;
        loop {
            match act(self) {
                Ok(()) => return Some(()),
                Err(error) => self.fails(&error.to_string(), pause),
            }
            pause = (pause * 2).min(LAST_PAUSE);
            if self.shared.stops() {
                return None;
            }
        }
    }

    /// Retries `attempt` until it succeeds. Returns false if the job is over before.
    pub(super) fn try_again_and_again(
        &mut self,
        is_over: impl Fn(&Puller) -> bool,
        mut attempt: impl FnMut(&mut Puller) -> Result<(), Failure>,
    ) -> bool {
        let mut pause = FIRST_PAUSE;
        loop {
            let begin = Instant::now();
            match attempt(self) {
                Ok(()) => return true,
                Err(Failure::Stopped) => return false,
                Err(Failure::Problem(problem)) => {
                    if begin.elapsed() > LAST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    self.fails(&problem, pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
            if is_over(self) {
                return false;
            }
        }
    }

    /// Reports a problem and waits for `pause`. The same problem is logged once in a row.
    pub(super) fn fails(&mut self, problem: &str, pause: Duration) {
        if self.told.as_deref() != Some(problem) {
            tracing::warn!("{}: {problem}; retrying", self.terms.source);
            self.told = Some(problem.to_owned());
        }
        self.shared.state().status.problem = Some(problem.to_owned());
        self.shared.pause(pause, |_| false);
    }

    /// Copies until all data is here and recorded.
    fn pull(&mut self, target: &Target) -> Result<(), Failure> {
        let uncertain = self.record.make_certain();
        uncertain.map_err(|error| self.unwritten(&error))?;
        let mut client = self.connect()?;
        self.shared.asks_for_changes(&client);
        let disk = Arc::new(source::open(&self.terms.source).map_err(problem)?);
        self.shared.asks_for_data(&disk);
        let mut job = Job::default();
        let source = job.client(disk, target.engine).map_err(problem)?;
        let own = job
            .client(target.disk.clone(), target.engine)
            .map_err(problem)?;
        let shared = self.shared.clone();
        let stops = || shared.stops();
        let copy = Copy {
            job: &job,
            source: &source,
            target: &own,
            pace: Pace::new(self.shared.rate.clone()),
            stops: &stops,
            slice: SLICE,
        };
        // A guest waits if the disk has been taken over before the connection was lost.
        copy.pace.set_free(self.taken);
        let mut speed = Speed::default();
        loop {
            if !self.taken {
                source::fetch(&mut client, &mut self.todo, &stops)?;
                if (self.is_wanted() || self.asked) && self.take_over(&mut client, &stops)? {
                    // A guest waits, so the rate is suspended.
                    copy.pace.set_free(true);
                    continue;
                }
            }
            let left = self.todo.changes().changed_bytes();
            self.now_left(left);
            if left > 0 {
                if !self.taken {
                    self.is_ready_in(speed.takes(left));
                }
                let begin = Instant::now();
                let copied = copy.slice(self.todo.changes(), &mut self.cursor)?;
                speed.copied(copied, begin.elapsed());
                self.has_copied(copied);
                continue;
            }
            if self.taken {
                match self.finish(&job, &own, &mut client, &stops)? {
                    true => return Ok(()),
                    false => continue,
                }
            }
            self.enter(Phase::Ready);
            let wanted = self.is_wanted();
            let pause = if wanted { IMPATIENT } else { IDLE };
            self.shared.pause(pause, |state| state.wanted && !wanted);
            if self.shared.stops() {
                return Err(Failure::Stopped);
            }
        }
    }

    /// Drops the change map, which post-copy does not use.
    pub(super) fn forget_todo(&mut self) {
        self.todo = Todo::new(0);
    }

    fn connect(&mut self) -> Result<ChangesClient, Failure> {
        if let Some(client) = self.client.take() {
            return Ok(client);
        }
        let (uri, id) = (&self.terms.source, self.record.id());
        let (client, is_new) = source::connect(uri, id, &mut self.todo).map_err(problem)?;
        if is_new {
            // The guest may have returned to the other server.
            self.taken = false;
            self.asked = false;
            self.shared.state().status.phase = Phase::Copying;
        }
        Ok(client)
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.shared.state().wanted
    }

    /// Takes the disk over.
    ///
    /// On `true`, nothing changes on the other server any more, and all changes are in `todo`.
    fn take_over(
        &mut self,
        client: &mut ChangesClient,
        stops: &dyn Fn() -> bool,
    ) -> Result<bool, Failure> {
        self.asked = true;
        match client.take_over().map_err(problem)? {
            Ok(()) => {
                source::fetch(client, &mut self.todo, stops)?;
                self.taken = true;
                self.enter(Phase::Switching);
                Ok(true)
            }
            Err(refused) => {
                self.asked = false;
                self.shared.state().status.problem = Some(refused.to_string());
                Ok(false)
            }
        }
    }

    /// Records that all data is here: from then on this is the disk. Returns false if data is left.
    fn finish(
        &mut self,
        job: &Job,
        own: &Client,
        client: &mut ChangesClient,
        stops: &dyn Fn() -> bool,
    ) -> Result<bool, Failure> {
        let errno = job.flush(own);
        if errno != 0 {
            // Data written before the failed flush may be lost.
            self.todo.all();
            let error = io::Error::from_raw_os_error(errno);
            return Err(problem(format!("cannot flush the disk: {}", cause(error))));
        }
        // Checks that the other server still knows of the takeover and has had no other users
        // since.
        let taken = client.take_over().map_err(problem)?;
        taken.map_err(problem)?;
        source::fetch(client, &mut self.todo, stops)?;
        if self.todo.changes().changed_bytes() > 0 {
            return Ok(false);
        }
        let noted = self.record.set_taken();
        noted.map_err(|error| self.unwritten(&error))?;
        Ok(true)
    }

    pub(super) fn unwritten(&self, error: &io::Error) -> Failure {
        problem(format!("{}: {}", self.terms.record.display(), cause(error)))
    }

    pub(super) fn now_left(&self, left: u64) {
        self.shared.state().status.left = left;
    }

    /// Updates the phase from the time that the remaining data takes.
    fn is_ready_in(&self, time: Duration) {
        if time < SHORT {
            self.enter(Phase::Ready);
        } else if time > 5 * SHORT {
            self.enter(Phase::Copying);
        }
    }

    pub(super) fn has_copied(&self, bytes: u64) {
        let status = &mut self.shared.state().status;
        status.copied += bytes;
        status.problem = None;
    }

    pub(super) fn enter(&self, phase: Phase) {
        let mut state = self.shared.state();
        if state.status.phase == phase {
            return;
        }
        state.status.problem = None;
        state.status.phase = phase;
        drop(state);
        let source = &self.terms.source;
        match phase {
            Phase::Copying => {}
            Phase::Ready if self.terms.post_copy => {
                tracing::info!(
                    "{source}: connected; writes of its guest are followed, and the guest can \
                     move here"
                )
            }
            Phase::Ready => {
                tracing::info!(
                    "{source}: copied, except what its guest changes; the guest can move here"
                )
            }
            Phase::Switching => tracing::info!("{source}: taken over"),
            Phase::Arriving => {
                tracing::info!(
                    "{source}: taken over; the guest runs here, and the remaining data is copied"
                )
            }
            Phase::Done => tracing::info!("{source}: copied completely"),
        }
        (self.tell)(phase);
    }
}

pub(super) fn problem(error: impl Display) -> Failure {
    Failure::Problem(cause(error))
}
