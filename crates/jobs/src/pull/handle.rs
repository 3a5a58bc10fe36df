//! The handle of a pull.

use super::puller::{Puller, Target, Tell};
use super::record::Record;
use super::shared::Shared;
use super::source::{self, Todo};
use super::terms::{Phase, Status, Terms};
use fathom_core::{ThreadKind, thread_starts};
use fathom_units::cause;
use parking_lot::Mutex;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between attempts to record that a disk moves to another server, after a failure.
const AGAIN: Duration = Duration::from_secs(1);

/// Time that a job has to end by itself.
const ORDERLY_END: Duration = Duration::from_secs(1);

/// A pull that has not started yet.
pub struct Prepared {
    terms: Terms,
    record: Record,
}

/// A disk that is being pulled from another server.
pub struct Pull {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Prepared {
    /// Opens the record of the move. The error is a message for the user.
    pub fn new(terms: Terms) -> Result<Prepared, String> {
        let record = Record::open(&terms, &new_id())?;
        Ok(Prepared { terms, record })
    }

    /// Returns whether the disk has been pulled completely before.
    pub fn is_here(&self) -> bool {
        self.record.is_taken()
    }

    /// Starts to wait for another server that takes over the disk, and records that move.
    pub fn note_going(self, gone: Gone) -> Result<Pull, String> {
        Pull::start(move |shared| note_going(shared, self.record, &gone))
    }

    /// Starts the pull.
    ///
    /// # Errors
    /// A message for the user: the pull cannot succeed with the present configuration.
    pub fn start(self, target: Target, tell: Tell, gone: Option<Gone>) -> Result<Pull, String> {
        let size = target.disk.info().size;
        let mut todo = Todo::new(size);
        let (mut client, is_arriving) = (None, self.record.is_arriving());
        if !is_arriving {
            // Problems with the source are reported at once.
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
        if follows && target.disk.saved_state_len() > 0 {
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

/// The move of a local disk to another server, which is complete once it is recorded durably.
pub trait Going: Send {
    /// Registers a callback, called whenever [`Going::is_to_be_noted`] becomes true.
    fn wake_by(&self, wake: Arc<dyn Fn() + Send + Sync>);
    /// Returns whether another server waits for the disk.
    fn is_to_be_noted(&self) -> bool;
    /// Reports whether the move is recorded durably. If it is not, the disk stays here.
    fn noted(&self, is_durable: bool);
}

/// A [`Going`] that the thread of the pull calls.
pub type Gone = Box<dyn Going>;

/// Records the move when another server waits for the disk.
///
/// Returns when the move is recorded, or when the job must stop.
fn note_going(shared: &Arc<Shared>, mut record: Record, gone: &Gone) {
    let waked = shared.clone();
    gone.wake_by(Arc::new(move || waked.wake()));
    let mut told = false;
    loop {
        shared.pause(AGAIN, |_| gone.is_to_be_noted());
        let stops = shared.stops();
        // After a failed write, the contents of the record are unknown.
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

    /// Returns the progress of the pull.
    pub fn status(&self) -> Status {
        self.shared.state().status.clone()
    }

    /// Returns the limit in bytes per second. `None` means no limit.
    pub fn rate(&self) -> Option<u64> {
        self.shared.rate.limit()
    }

    /// Sets the limit in bytes per second. The limit applies to the next piece that is copied.
    pub fn set_rate(&self, limit: Option<u64>) {
        self.shared.rate.set(limit);
    }

    /// Returns whether the disk has been pulled completely.
    pub fn is_done(&self) -> bool {
        self.shared.state().status.phase == Phase::Done
    }

    /// Sets whether a local guest wants the disk.
    pub fn want(&self, wanted: bool) {
        self.shared.state().wanted = wanted;
        self.shared.changed.notify_all();
    }

    /// Tells the job to stop. Does not wait. An incomplete copy is unusable.
    pub fn begin_stop(&self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_all();
    }

    /// Ends the job. If the other server does not respond, its connections are closed.
    ///
    /// Returns false if the job still uses the disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.begin_stop();
        let mut give_up_at = Some(Instant::now() + ORDERLY_END);
        let mut thread = self.thread.lock();
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
        // The panic handler has already reported a panic of that thread.
        thread.take().map(JoinHandle::join);
        true
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

/// Returns a new, unique identifier of a move.
fn new_id() -> String {
    // The system's random numbers are the keys of the hasher.
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
