//! Disks that another server takes over while their guests use them.
//!
//! That server copies the disk as any client reads it, and is told what has changed since: by a metadata
//! context of Fathom's own, on one connection. When the guest has stopped here it takes the disk over,
//! by a command of Fathom's own, and is told the rest. No guest can have the disk here afterwards.
//! docs/move.md has the protocol.

use fathom_core::changes::Run;
use fathom_core::{Changes, Disk, Left, Part, WorkerHandle};
use fathom_nbd::protocol::is_move_id;
use serde_json::json;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Runs in one answer, about.
const MOST_RUNS: usize = 256;

/// Whether a disk has moved, and who is at it.
pub struct Moving {
    disk: Arc<dyn Disk>,
    workers: Arc<[WorkerHandle]>,
    state: Mutex<State>,
    /// Locked while workers are told; never by them.
    telling: Mutex<()>,
}

#[derive(Default)]
struct State {
    front_end: bool,
    /// By whom it has been taken over.
    taken: Option<String>,
    move_: Option<Move>,
    note: Note,
}

/// Whether the take-over is noted durably, where somebody notes it.
#[derive(Default)]
struct Note {
    /// Wakes whoever notes a take-over; none: nobody does.
    wake: Option<Wake>,
    is_durable: bool,
    has_failed: bool,
}

/// Called when a take-over is to be noted; must not block.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// What one server has been told.
struct Move {
    id: String,
    changes: Arc<Changes>,
    /// The connection that asks; there is one at a time.
    asks: Weak<()>,
}

/// What a connection that asks for changes has.
pub struct Mover {
    moving: Arc<Moving>,
    id: String,
    changes: Arc<Changes>,
    _asks: Arc<()>,
}

/// Whether all of them have done what they were told until now.
fn workers_hear(workers: &[WorkerHandle]) -> bool {
    let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
    looks.into_iter().all(|look| look.wait().is_ok())
}

/// What a connection asks to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// What changes from now on.
    Begin,
    /// What has changed since it was last told.
    GoOn,
}

impl Moving {
    /// Nobody is at it.
    pub fn new(disk: Arc<dyn Disk>, workers: Arc<[WorkerHandle]>) -> Arc<Moving> {
        Arc::new(Moving {
            disk,
            workers,
            state: Mutex::default(),
            telling: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A guest wants the disk. The error says why it cannot have it.
    pub fn front_end_comes(&self) -> Result<(), String> {
        let mut state = self.state();
        if let Some(id) = &state.taken {
            return Err(format!(
                "the disk has moved to another server (as {id}), where its guest must run"
            ));
        }
        state.front_end = true;
        Ok(())
    }

    /// Nothing of the guest is in flight, and nothing more will come.
    pub fn front_end_left(&self) {
        self.state().front_end = false;
    }

    /// From now on the disk goes only once a take-over is noted. `wake` is called whenever
    /// [`Moving::is_to_be_noted`] becomes true; [`Moving::noted`] is expected then.
    pub fn note_by(&self, wake: Wake) {
        self.state().note.wake = Some(wake);
    }

    /// Another server wants the disk, and is answered once that is noted.
    pub fn is_to_be_noted(&self) -> bool {
        let state = self.state();
        state.taken.is_some() && !state.note.is_durable
    }

    /// The take-over is noted durably; or it could not be, and the disk stays.
    pub fn noted(&self, is_durable: bool) {
        let mut state = self.state();
        state.note.is_durable = is_durable;
        state.note.has_failed = !is_durable;
        match &state.taken {
            Some(id) if is_durable => {
                tracing::info!("nbd: another server has taken a disk over, as {id}");
            }
            _ => state.taken = None,
        }
    }

    /// By whom it has been taken over; None: it has not moved.
    pub fn taken(&self) -> Option<String> {
        self.state().taken.clone()
    }

    /// The error says why not.
    pub(super) fn ask(self: &Arc<Self>, ask: Ask, id: &str) -> Result<Mover, String> {
        let telling = self.telling.lock().unwrap_or_else(|e| e.into_inner());
        let asks = Arc::new(());
        // (Workers want to know the state, too, and do not wait for memory.)
        let begins = ask == Ask::Begin;
        let new = begins.then(|| Arc::new(Changes::new(self.disk.info().size)));
        let mut state = self.state();
        let taken = state.taken.as_ref();
        if taken.is_some_and(|taken| taken != id) {
            return Err("another server has taken the disk over".into());
        }
        if let Some(other) = &mut state.move_ {
            if other.id != id && other.asks.strong_count() > 0 {
                return Err("another server is copying the disk".into());
            }
            if other.id == id && !begins && self.is_as_long(&other.changes) {
                other.asks = Arc::downgrade(&asks);
                let changes = other.changes.clone();
                drop(state);
                return Ok(self.mover(id, changes, asks));
            }
        }
        let Some(changes) = new else {
            return Err("the server does not know this move; begin again".into());
        };
        state.move_ = Some(Move {
            id: id.to_owned(),
            changes: changes.clone(),
            asks: Arc::downgrade(&asks),
        });
        // A worker may want to know the state meanwhile.
        drop(state);
        let note = |worker: &WorkerHandle| worker.note_changes(Some(changes.clone()));
        self.workers.iter().for_each(note);
        let heard = workers_hear(&self.workers);
        drop(telling);
        match heard {
            true => Ok(self.mover(id, changes, asks)),
            false => Err("a worker did not respond".into()),
        }
    }

    fn is_as_long(&self, changes: &Changes) -> bool {
        !changes.is_outgrown() && changes.size() == self.disk.info().size
    }

    fn mover(self: &Arc<Self>, id: &str, changes: Arc<Changes>, asks: Arc<()>) -> Mover {
        Mover {
            moving: self.clone(),
            id: id.to_owned(),
            changes,
            _asks: asks,
        }
    }
}

/// Whoever goes on with the disk knows that it has moved. What is noted of a move stays behind: it begins
/// again.
impl Part for Moving {
    fn may_go(&self) -> Result<(), String> {
        let state = self.state();
        let is_asked = |one: &Move| one.asks.strong_count() > 0;
        match state.taken.is_none() && state.move_.as_ref().is_some_and(is_asked) {
            true => {
                Err("another server is taking the disk over; wait until that has completed".into())
            }
            false => Ok(()),
        }
    }

    fn leave(&self) -> io::Result<Option<Left>> {
        let mut state = self.state();
        state.move_ = None;
        Ok(state.taken.as_ref().map(|id| Left {
            values: json!({ TAKEN: id }),
            files: Vec::new(),
            is_needed: true,
        }))
    }

    fn inherit(&self, left: Left) -> Result<(), String> {
        let id = left.values[TAKEN].as_str().filter(|id| is_move_id(id));
        let id = id.ok_or("the saved state does not say which server took the disk over")?;
        self.state().taken = Some(id.to_owned());
        Ok(())
    }
}

/// By whom, in what is left.
const TAKEN: &str = "taken";

impl Mover {
    /// What has changed in the range since it was last told, from its beginning on. The error is for the
    /// server that asks.
    pub(super) fn changed(&self, range: Range<u64>) -> Result<Vec<Run>, &'static str> {
        if !range.start.is_multiple_of(self.changes.block()) {
            return Err("the range does not begin at a block");
        }
        if !self.moving.is_as_long(&self.changes) {
            return Err("the disk has been resized");
        }
        if !self.is_current(&self.moving.state()) {
            return Err("the server no longer knows this move; begin again");
        }
        Ok(self.changes.take(range, MOST_RUNS))
    }

    fn is_current(&self, state: &State) -> bool {
        let current = state.move_.as_ref();
        current.is_some_and(|one| Arc::ptr_eq(&one.changes, &self.changes))
    }

    /// Whether this client's server has taken the disk over.
    pub(super) fn has_taken_over(&self) -> bool {
        self.moving.taken().is_some_and(|taken| taken == self.id)
    }

    /// From now on no guest has the disk here. Whoever has taken it over may do so again.
    pub(super) fn take_over(&self) -> Result<(), &'static str> {
        let mut state = self.moving.state();
        if !self.is_current(&state) {
            return Err("the server no longer knows this move; begin again");
        }
        if state.front_end {
            return Err("the disk's guest is running here");
        }
        let is_new = state.taken.is_none();
        if let Some(wake) = state.note.wake.clone().filter(|_| !state.note.is_durable) {
            // No guest comes meanwhile. (Whoever has been answered has the disk, whatever happens here.)
            state.taken = Some(self.id.clone());
            let has_failed = std::mem::take(&mut state.note.has_failed);
            drop(state);
            wake();
            return Err(match has_failed {
                false => "the server is recording that the disk moves; retry",
                true => "the server could not record that the disk moves (see its log); retry",
            });
        }
        state.taken = Some(self.id.clone());
        drop(state);
        if is_new {
            tracing::info!("nbd: another server has taken a disk over, as {}", self.id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_core::{Channel, Cx, DiskError, DiskInfo};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    struct Unused;

    impl Disk for Unused {
        fn info(&self) -> DiskInfo {
            DiskInfo {
                size: 1 << 20,
                block_size: 512,
                physical_block_size: 512,
                optimal_io_size: 0,
                read_only: false,
                write_cache: true,
                discard: None,
                write_zeroes: None,
            }
        }

        fn activate(&self) -> Result<(), DiskError> {
            Ok(())
        }

        fn deactivate(&self) -> Result<(), DiskError> {
            Ok(())
        }

        fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
            unreachable!("no worker has it")
        }
    }

    fn moving() -> Arc<Moving> {
        Moving::new(Arc::new(Unused), Arc::from(Vec::new()))
    }

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn take_over_is_answered_when_it_is_durable() {
        let moving = moving();
        let waked = Arc::new(AtomicUsize::new(0));
        let count = waked.clone();
        moving.note_by(Arc::new(move || {
            count.fetch_add(1, SeqCst);
        }));
        let mover = moving.ask(Ask::Begin, ID).unwrap();
        assert!(!moving.is_to_be_noted());
        assert!(mover.take_over().unwrap_err().contains("is recording"));
        assert!(moving.is_to_be_noted());
        assert_eq!(waked.load(SeqCst), 1);
        // The guest must not come back meanwhile.
        assert!(moving.front_end_comes().is_err());
        assert!(mover.take_over().is_err());
        moving.noted(true);
        assert!(!moving.is_to_be_noted());
        for _ in 0..2 {
            mover.take_over().unwrap();
        }
        assert_eq!(moving.taken().as_deref(), Some(ID));
        assert!(moving.front_end_comes().is_err());
    }

    #[test]
    fn disk_stays_when_its_going_cannot_be_noted() {
        let moving = moving();
        moving.note_by(Arc::new(|| ()));
        let mover = moving.ask(Ask::Begin, ID).unwrap();
        mover.take_over().unwrap_err();
        moving.noted(false);
        assert!(!moving.is_to_be_noted());
        assert_eq!(moving.taken(), None);
        moving.front_end_comes().unwrap();
        assert!(mover.take_over().unwrap_err().contains("running here"));
        moving.front_end_left();
        assert!(mover.take_over().unwrap_err().contains("could not record"));
        moving.noted(true);
        mover.take_over().unwrap();
    }

    #[test]
    fn without_a_record_a_disk_goes_at_once() {
        let moving = moving();
        let mover = moving.ask(Ask::Begin, ID).unwrap();
        mover.take_over().unwrap();
        assert_eq!(moving.taken().as_deref(), Some(ID));
    }
}
