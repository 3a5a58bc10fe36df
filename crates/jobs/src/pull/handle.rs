//! A disk's way here, for whoever has it come.

use super::puller::{Puller, Target, Tell};
use super::record::Record;
use super::shared::Shared;
use super::source::{self, Todo};
use super::terms::{Phase, Status, Terms};
use fathom_core::{ThreadKind, thread_starts};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// So often it is looked whether a disk that is here has gone to another server.
const GOING: Duration = Duration::from_millis(200);

/// A disk that is to come here, and has not come yet.
pub struct Prepared {
    terms: Terms,
    record: Record,
}

/// A disk that comes here.
pub struct Pull {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Prepared {
    /// The error is for the user.
    pub fn new(terms: Terms) -> Result<Prepared, String> {
        let record = Record::open(&terms, &new_id())?;
        Ok(Prepared { terms, record })
    }

    /// It has come here before, and is the disk.
    pub fn is_here(&self) -> bool {
        self.record.is_taken()
    }

    /// Notes it when the disk, which is here, goes to another server.
    pub fn note_going(self, gone: Gone) -> Result<Pull, String> {
        Pull::start(move |shared| note_going(shared, self.record, &gone))
    }

    /// Has it come, from now on. The error is for the user: it can never come, as things are.
    pub fn start(self, target: Target, tell: Tell, gone: Option<Gone>) -> Result<Pull, String> {
        let size = target.disk.info().size;
        let mut todo = Todo::new(size);
        let (mut client, is_arriving) = (None, self.record.is_arriving());
        if !is_arriving {
            // What is wrong with the source is said at once.
            let id = self.record.id();
            let connected = source::connect(&self.terms.source, id, &mut todo);
            client = Some(connected.map_err(|error| error.to_string())?.0);
        }
        let follows = self.terms.post_copy || is_arriving;
        if is_arriving && gone.is_some() {
            return Err(
                "not all of it is here yet: serve it without --nbd-move until it is".into(),
            );
        }
        if follows && target.disk.keepsake_len() > 0 {
            return Err(
                "--pull-post-copy is for raw images, and this one has tables: make a raw one, or leave the \
                 option out"
                    .into(),
            );
        }
        Pull::start(move |shared| {
            shared.state().status.left = size;
            let puller = Puller::new(
                self.terms,
                self.record,
                shared.clone(),
                (todo, client),
                tell,
            );
            let record = match follows {
                true => puller.run_at_once(&target),
                false => puller.run(&target),
            };
            if let Some((record, gone)) = record.zip(gone) {
                note_going(shared, record, &gone);
            }
        })
    }
}

/// Whether another server has taken the disk over.
pub type Gone = Box<dyn Fn() -> bool + Send>;

/// Until it has, or until the end.
fn note_going(shared: &Shared, mut record: Record, gone: &Gone) {
    let mut told = false;
    loop {
        shared.pause(GOING, |_| false);
        let stops = shared.stops();
        if gone() {
            match record.set_gone() {
                Ok(()) => return,
                Err(_) if told => {}
                Err(error) => tracing::error!("it cannot be noted that a disk has gone: {error}"),
            }
            told = true;
        }
        if stops {
            return;
        }
    }
}

impl Pull {
    fn start(work: impl FnOnce(&Arc<Shared>) + Send + 'static) -> Result<Pull, String> {
        let shared = Arc::<Shared>::default();
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("pull".into());
        let thread = thread.spawn(move || {
            thread_starts(ThreadKind::General);
            work(&own);
        });
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Pull {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

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

/// One that nobody else has.
fn new_id() -> String {
    // (Keyed by the system's random numbers.)
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
