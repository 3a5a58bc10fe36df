//! The thread that has a disk come here.

use super::copy::{Copy, Failure};
use super::record::Record;
use super::source::{self, Todo};
use super::terms::{Phase, Status, Terms};
use fathom_core::{Disk, ThreadKind, WorkerHandle, thread_starts};
use fathom_stack::{Client, Job, Latch};
use fathom_storage::{ChangesClient, EngineKind};
use std::collections::hash_map::RandomState;
use std::fmt::Display;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A guest can wait for so long: what is left then is no reason not to come.
const SHORT: Duration = Duration::from_millis(200);

/// How long is waited after a failure, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(10);

/// While all is copied, it is asked so often what has changed.
const IDLE: Duration = Duration::from_millis(100);
/// And so often whether the guest has stopped there, when it is to go on here.
const IMPATIENT: Duration = Duration::from_millis(2);

/// A disk that is to come here, and has not come yet.
pub struct Prepared {
    terms: Terms,
    record: Record,
}

/// Where it comes.
pub struct Target {
    /// All that is copied is written here; in use by the job while it has it.
    pub disk: Arc<dyn Disk>,
    pub engine: EngineKind,
    /// Opened for the guest, whose workers these are, when all is here.
    pub latch: Latch,
    pub workers: Arc<[WorkerHandle]>,
}

/// Hears of each change of phase.
pub type Tell = Box<dyn Fn(Phase) + Send>;

/// A disk that comes here.
pub struct Pull {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    status: Status,
    /// A guest is here and wants the disk.
    wanted: bool,
    stop: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until that time is over, or there is something to be looked at.
    fn pause(&self, time: Duration, is_news: impl Fn(&State) -> bool) {
        let idle = |state: &mut State| !state.stop && !is_news(state);
        drop(self.changed.wait_timeout_while(self.state(), time, idle));
    }

    fn stops(&self) -> bool {
        self.state().stop
    }
}

impl Prepared {
    /// None: it has come here before. The error is for the user.
    pub fn new(terms: Terms) -> Result<Option<Prepared>, String> {
        let record = Record::open(&terms.record, &new_id())?;
        Ok((!record.is_taken()).then_some(Prepared { terms, record }))
    }

    /// Has it come, from now on. The error is for the user: it can never come, as things are.
    pub fn start(self, target: Target, tell: Tell) -> Result<Pull, String> {
        let size = target.disk.info().size;
        let mut todo = Todo::new(size);
        // What is wrong with the source is said at once.
        let id = self.record.id();
        let client = source::connect(&self.terms.source, id, &mut todo);
        let (client, _) = client.map_err(|error| error.to_string())?;
        let shared = Arc::<Shared>::default();
        shared.state().status.left = size;
        let puller = Puller {
            terms: self.terms,
            record: self.record,
            shared: shared.clone(),
            todo,
            cursor: 0,
            taken: false,
            client: Some(client),
            tell,
        };
        let thread = std::thread::Builder::new()
            .name("pull".into())
            .spawn(move || {
                thread_starts(ThreadKind::General);
                puller.run(&target);
            });
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Pull {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }
}

impl Pull {
    pub fn status(&self) -> Status {
        self.shared.state().status.clone()
    }

    /// All of it is here.
    pub fn is_done(&self) -> bool {
        self.shared.state().status.phase == Phase::Done
    }

    /// A guest is here and wants the disk, or does no more.
    pub fn want(&self, wanted: bool) {
        self.shared.state().wanted = wanted;
        self.shared.changed.notify_all();
    }

    /// Lets it be; what is copied is of no use then, unless all of it is. Does not wait for it.
    pub fn begin_stop(&self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_all();
    }

    /// Waits until it has let go of the disk. False: it has not at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.begin_stop();
        let mut thread = self.thread.lock().unwrap_or_else(|e| e.into_inner());
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A panic has been told of.
        thread.take().map(JoinHandle::join);
        true
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

struct Puller {
    terms: Terms,
    record: Record,
    shared: Arc<Shared>,
    todo: Todo,
    /// Where copying goes on.
    cursor: u64,
    /// It has been taken over: nothing changes there any more.
    taken: bool,
    /// One that was connected beforehand.
    client: Option<ChangesClient>,
    tell: Tell,
}

impl Puller {
    fn run(mut self, target: &Target) {
        let activated = loop {
            match target.disk.activate() {
                Ok(()) => break true,
                Err(error) => self.fails(&error.to_string(), FIRST_PAUSE),
            }
            if self.shared.stops() {
                break false;
            }
        };
        if activated {
            self.try_again_and_again(target);
            if let Err(error) = target.disk.deactivate() {
                tracing::error!("{error}");
            }
        }
    }

    fn try_again_and_again(&mut self, target: &Target) {
        let mut pause = FIRST_PAUSE;
        loop {
            let before = self.shared.state().status.copied;
            match self.pull(target) {
                Ok(()) | Err(Failure::Stopped) => return,
                Err(Failure::Problem(problem)) => {
                    let has_gone_on = self.shared.state().status.copied > before;
                    pause = if has_gone_on { FIRST_PAUSE } else { pause };
                    self.fails(&problem, pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }

    /// It is told once.
    fn fails(&self, problem: &str, pause: Duration) {
        let mut state = self.shared.state();
        if state.status.problem.as_deref() != Some(problem) {
            tracing::warn!("{}: {problem}; it will be tried again", self.terms.source);
            state.status.problem = Some(problem.to_owned());
        }
        drop(state);
        self.shared.pause(pause, |_| false);
    }

    /// Until all is here.
    fn pull(&mut self, target: &Target) -> Result<(), Failure> {
        let mut client = self.connect()?;
        let disk = Arc::new(source::open(&self.terms.source).map_err(problem)?);
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
            rate: self.terms.rate,
            stops: &stops,
        };
        let mut speed = Speed::default();
        loop {
            if !self.taken {
                source::fetch(&mut client, &self.todo).map_err(problem)?;
                if self.is_wanted() && self.take_over(&mut client)? {
                    continue;
                }
            }
            let left = self.todo.changes().changed_bytes();
            self.now_left(left);
            if left > 0 {
                if speed.takes(left) < SHORT {
                    self.enter(Phase::Ready);
                }
                let begin = Instant::now();
                let copied = copy.slice(self.todo.changes(), &mut self.cursor)?;
                speed.copied(copied, begin.elapsed());
                self.has_copied(copied);
                continue;
            }
            if self.taken {
                return self.finish(&job, &own, target);
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

    fn connect(&mut self) -> Result<ChangesClient, Failure> {
        if let Some(client) = self.client.take() {
            return Ok(client);
        }
        let (uri, id) = (&self.terms.source, self.record.id());
        let (client, is_new) = source::connect(uri, id, &mut self.todo).map_err(problem)?;
        if is_new && std::mem::take(&mut self.taken) {
            // Its guest may have come back to it.
            self.enter(Phase::Copying);
        }
        Ok(client)
    }

    fn is_wanted(&self) -> bool {
        self.shared.state().wanted
    }

    /// True: nothing changes there any more, and all that has is to be done.
    fn take_over(&mut self, client: &mut ChangesClient) -> Result<bool, Failure> {
        match client.take_over().map_err(problem)? {
            Ok(()) => {
                source::fetch(client, &self.todo).map_err(|error| {
                    // It may have been told, and not heard of.
                    self.todo.all();
                    problem(error)
                })?;
                self.taken = true;
                self.enter(Phase::Switching);
                Ok(true)
            }
            Err(refused) => {
                self.shared.state().status.problem = Some(refused.to_string());
                Ok(false)
            }
        }
    }

    /// All is here: from now on this is the disk.
    fn finish(&mut self, job: &Job, own: &Client, target: &Target) -> Result<(), Failure> {
        let errno = job.flush(own);
        if errno != 0 {
            // What was written may be lost.
            self.todo.all();
            let error = io::Error::from_raw_os_error(errno);
            return Err(problem(format!("the disk cannot be flushed: {error}")));
        }
        let noted = self.record.set_taken();
        noted.map_err(|error| problem(format!("{}: {error}", self.terms.record.display())))?;
        target.latch.open(&target.workers);
        self.enter(Phase::Done);
        Ok(())
    }

    fn now_left(&self, left: u64) {
        self.shared.state().status.left = left;
    }

    fn has_copied(&self, bytes: u64) {
        let status = &mut self.shared.state().status;
        status.copied += bytes;
        status.problem = None;
    }

    fn enter(&self, phase: Phase) {
        let mut state = self.shared.state();
        let before = state.status.phase;
        // What has been taken over stays so while the rest is copied.
        if before == phase || (before, phase) == (Phase::Switching, Phase::Ready) {
            return;
        }
        state.status.problem = None;
        state.status.phase = phase;
        drop(state);
        let source = &self.terms.source;
        match phase {
            Phase::Copying => {}
            Phase::Ready => {
                tracing::info!("{source}: all but what changes is here: its guest may come")
            }
            Phase::Switching => tracing::info!("{source}: has been taken over"),
            Phase::Done => tracing::info!("{source}: all of it is here"),
        }
        (self.tell)(phase);
    }
}

/// How fast it is copied.
#[derive(Default)]
struct Speed {
    /// Bytes a second, of late.
    rate: f64,
}

impl Speed {
    fn copied(&mut self, bytes: u64, time: Duration) {
        let rate = bytes as f64 / time.as_secs_f64().max(1e-6);
        self.rate = match self.rate {
            0.0 => rate,
            before => (3.0 * before + rate) / 4.0,
        };
    }

    /// How long so much takes, as far as can be told.
    fn takes(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.rate.max(1.0);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

fn problem(error: impl Display) -> Failure {
    Failure::Problem(error.to_string())
}

/// One that nobody else has.
fn new_id() -> String {
    // (Keyed by the system's random numbers.)
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
