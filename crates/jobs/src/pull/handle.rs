//! A disk's way here, for whoever has it come.

use super::puller::{Puller, Target, Tell};
use super::record::Record;
use super::shared::Shared;
use super::source::{self, Todo};
use super::terms::{Phase, Status, Terms};
use fathom_core::{ThreadKind, thread_starts};
use fathom_units::cause;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between attempts to note that a disk goes to another server, while that fails.
const AGAIN: Duration = Duration::from_secs(1);

/// Time that a job has to end by itself.
const ORDERLY_END: Duration = Duration::from_secs(1);

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
                "the disk has not arrived completely; serve it without --nbd-move until it has"
                    .into(),
            );
        }
        if follows && target.disk.keepsake_len() > 0 {
            return Err(
                "--pull-post-copy: applies only to raw images, and this image has tables; use a \
                 raw image, or omit the option"
                    .into(),
            );
        }
        Pull::start(move |shared| {
            shared.rate.set(self.terms.rate);
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

/// How another server takes over a disk that is here: the disk goes once that is noted durably.
pub trait Going: Send {
    /// Has `wake` called whenever [`Going::is_to_be_noted`] becomes true.
    fn wake_by(&self, wake: Arc<dyn Fn() + Send + Sync>);
    /// Another server waits for the disk.
    fn is_to_be_noted(&self) -> bool;
    /// That is noted durably; or it could not be, and the disk stays.
    fn noted(&self, is_durable: bool);
}

pub type Gone = Box<dyn Going>;

/// Notes that the disk goes, when another server waits for that. Returns when it is noted, or at the end.
fn note_going(shared: &Arc<Shared>, mut record: Record, gone: &Gone) {
    let waked = shared.clone();
    gone.wake_by(Arc::new(move || waked.wake()));
    let mut told = false;
    loop {
        shared.pause(AGAIN, |_| gone.is_to_be_noted());
        let stops = shared.stops();
        // (After a failure nobody knows what the record says.)
        let certain = record.make_certain();
        let noted = match gone.is_to_be_noted() {
            true => certain.and_then(|()| record.set_gone()).map(|()| true),
            false => certain.map(|()| false),
        };
        match noted {
            Ok(true) => return gone.noted(true),
            Ok(false) => {}
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::error!(
                        "cannot record that a disk moves to another server, so the move fails: \
                         {}",
                        cause(error)
                    );
                }
                gone.noted(false);
            }
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
        let thread = thread.map_err(|error| format!("cannot start a thread: {}", cause(error)))?;
        Ok(Pull {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    pub fn status(&self) -> Status {
        self.shared.state().status.clone()
    }

    /// How many bytes it may copy per second. `None`: as many as it can.
    pub fn rate(&self) -> Option<u64> {
        self.shared.rate.limit()
    }

    /// Sets that limit. It applies to the next piece that is copied.
    pub fn set_rate(&self, limit: Option<u64>) {
        self.shared.rate.set(limit);
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

    /// Ends the job. If the other server does not answer, its answers are not waited for any more. Returns false if the
    /// job still uses the disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.begin_stop();
        let mut give_up_at = Some(Instant::now() + ORDERLY_END);
        let mut thread = self.thread.lock().unwrap_or_else(|e| e.into_inner());
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            if give_up_at.take_if(|at| *at <= now).is_some() {
                self.shared.give_source_up();
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
