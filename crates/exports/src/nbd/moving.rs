//! Lets another server take over a disk while its guest uses it.
//!
//! The other server copies the disk as any client reads it. On one connection, a metadata context
//! of Fathom's own reports which blocks have changed since. When the guest has stopped here, the
//! other server takes over the disk by a command of Fathom's own, and reads the last changes.
//! Afterwards no guest can use the disk here. docs/move.md describes the protocol.

use fathom_core::changes::Run;
use fathom_core::{Changes, Disk, Part, PartState, WorkerHandle};
use fathom_nbd::protocol::is_move_id;
use parking_lot::Mutex;
use serde_json::json;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Approximate maximum number of runs in one reply.
const MOST_RUNS: usize = 256;

/// Whether a disk has moved to another server, and who uses it.
pub struct Moving {
    disk: Arc<dyn Disk>,
    workers: Arc<[WorkerHandle]>,
    state: Mutex<State>,
    /// Held while the order to record changes is sent to the workers. Workers never lock it.
    telling: Mutex<()>,
}

#[derive(Default)]
struct State {
    front_end: bool,
    /// Id of the move that has taken over the disk.
    taken: Option<String>,
    move_: Option<Move>,
    note: Note,
}

/// Whether a take-over has been recorded durably, if something records it.
#[derive(Default)]
struct Note {
    /// Wakes the thread that records a take-over; None if nothing records it.
    wake: Option<Wake>,
    is_durable: bool,
    has_failed: bool,
}

/// Callback that reports a take-over to record; must not block.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// A move in progress: the changes recorded for one server.
struct Move {
    id: String,
    changes: Arc<Changes>,
    /// The connection that asks for the changes; there is at most one.
    asks: Weak<()>,
}

/// The right of one connection to ask for changes.
pub struct Mover {
    moving: Arc<Moving>,
    id: String,
    changes: Arc<Changes>,
    _asks: Arc<()>,
}

/// Waits until each worker has processed its earlier messages. Returns false if one did not
/// respond.
fn workers_hear(workers: &[WorkerHandle]) -> bool {
    let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
    looks.into_iter().all(|look| look.wait().is_ok())
}

/// Which changes a connection asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Changes from now on.
    Begin,
    /// Changes since the last reply.
    GoOn,
}

impl Moving {
    /// Creates the state of a disk without users.
    pub fn new(disk: Arc<dyn Disk>, workers: Arc<[WorkerHandle]>) -> Arc<Moving> {
        Arc::new(Moving {
            disk,
            workers,
            state: Mutex::default(),
            telling: Mutex::default(),
        })
    }

    /// Admits a front-end. The error says why the guest cannot have the disk.
    pub fn front_end_comes(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        if let Some(id) = &state.taken {
            return Err(format!(
                "the disk has moved to another server (as {id}), where its guest must run"
            ));
        }
        state.front_end = true;
        Ok(())
    }

    /// Notes that the guest has no requests in flight and sends no more.
    pub fn front_end_left(&self) {
        self.state.lock().front_end = false;
    }

    /// Makes every take-over wait until it is recorded.
    ///
    /// `wake` is called whenever [`Moving::is_to_be_noted`] becomes true; the recorder must then
    /// call [`Moving::noted`].
    pub fn note_by(&self, wake: Wake) {
        self.state.lock().note.wake = Some(wake);
    }

    /// Returns true while a take-over waits to be recorded.
    pub fn is_to_be_noted(&self) -> bool {
        let state = self.state.lock();
        state.taken.is_some() && !state.note.is_durable
    }

    /// Reports that the take-over is recorded durably, or could not be recorded; then the disk
    /// stays here.
    pub fn noted(&self, is_durable: bool) {
        let mut state = self.state.lock();
        state.note.is_durable = is_durable;
        state.note.has_failed = !is_durable;
        match &state.taken {
            Some(id) if is_durable => {
                tracing::info!("nbd: another server has taken a disk over, as {id}");
            }
            _ => state.taken = None,
        }
    }

    /// Returns the id of the move that has taken over the disk; None if the disk has not moved.
    pub fn taken(&self) -> Option<String> {
        self.state.lock().taken.clone()
    }

    /// Starts or continues a move. The error says why that is refused.
    pub(super) fn ask(self: &Arc<Self>, ask: Ask, id: &str) -> Result<Mover, String> {
        let telling = self.telling.lock();
        let asks = Arc::new(());
        // Allocated before the lock, since workers also lock the state and must not wait for
        // memory.
        let begins = ask == Ask::Begin;
        let new = begins.then(|| Arc::new(Changes::new(self.disk.info().size)));
        let mut state = self.state.lock();
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
        // A worker may lock the state meanwhile.
        drop(state);
        let note = |worker: &WorkerHandle| worker.note_changes(Some(changes.clone()));
        self.workers.iter().for_each(note);
        let heard = workers_hear(&self.workers);
        drop(telling);
        match heard {
            true => Ok(self.mover(id, changes, asks)),
            false => {
                self.forget(&changes);
                Err("a worker did not respond".into())
            }
        }
    }

    /// Ends a move some of whose changes may not be recorded, so that no request continues it.
    fn forget(&self, changes: &Arc<Changes>) {
        let is_meant = |one: &mut Move| Arc::ptr_eq(&one.changes, changes);
        self.state.lock().move_.take_if(is_meant);
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

/// A successor process must know that the disk has moved. Recorded changes are not handed over: the
/// move begins again.
impl Part for Moving {
    fn check_handover(&self) -> Result<(), String> {
        let state = self.state.lock();
        let is_asked = |one: &Move| one.asks.strong_count() > 0;
        match state.taken.is_none() && state.move_.as_ref().is_some_and(is_asked) {
            true => {
                Err("another server is taking the disk over; wait until that has completed".into())
            }
            false => Ok(()),
        }
    }

    fn final_state(&self) -> io::Result<Option<PartState>> {
        let mut state = self.state.lock();
        state.move_ = None;
        Ok(state.taken.as_ref().map(|id| PartState {
            values: json!({ TAKEN: id }),
            files: Vec::new(),
            is_needed: true,
        }))
    }

    fn restore(&self, left: PartState) -> Result<(), String> {
        let id = left.values[TAKEN].as_str().filter(|id| is_move_id(id));
        let id = id.ok_or("the saved state does not say which server took the disk over")?;
        self.state.lock().taken = Some(id.to_owned());
        Ok(())
    }
}

/// Key of the move's id in the saved state.
const TAKEN: &str = "taken";

impl Mover {
    /// Returns the changes in the range since the last reply, from the start of the range on. The
    /// error is for the server that asks.
    pub(super) fn changed(&self, range: Range<u64>) -> Result<Vec<Run>, &'static str> {
        if !range.start.is_multiple_of(self.changes.block()) {
            return Err("the range does not begin at a block");
        }
        if !self.moving.is_as_long(&self.changes) {
            return Err("the disk has been resized");
        }
        if !self.is_current(&self.moving.state.lock()) {
            return Err("the server no longer knows this move; begin again");
        }
        Ok(self.changes.take(range, MOST_RUNS))
    }

    fn is_current(&self, state: &State) -> bool {
        let current = state.move_.as_ref();
        current.is_some_and(|one| Arc::ptr_eq(&one.changes, &self.changes))
    }

    /// Returns true if this client's server has taken over the disk.
    pub(super) fn has_taken_over(&self) -> bool {
        self.moving.taken().is_some_and(|taken| taken == self.id)
    }

    /// Takes over the disk: from now on no guest can use it here. The same server may repeat the
    /// command.
    pub(super) fn take_over(&self) -> Result<(), &'static str> {
        let mut state = self.moving.state.lock();
        if !self.is_current(&state) {
            return Err("the server no longer knows this move; begin again");
        }
        if state.front_end {
            return Err("the disk's guest is running here");
        }
        let is_new = state.taken.is_none();
        if let Some(wake) = state.note.wake.clone().filter(|_| !state.note.is_durable) {
            // `taken` already keeps guests out. Once the client has its reply, the disk is its own,
            // even if this process dies.
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
    use fathom_core::testing::TestDisk;
    use fathom_core::{Channel, Cx, DiskError, DiskInfo};
    use fathom_testing::PATIENCE;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Instant;

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
        // No guest may connect while the take-over is being recorded.
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
    fn move_whose_begin_has_failed_cannot_be_continued() {
        let disk = TestDisk::new();
        let workers = disk.workers(1);
        workers[0].stop();
        assert!(workers[0].wait_until_stopped(Instant::now() + PATIENCE));
        let moving = Moving::new(disk, workers);
        let ask = |ask| moving.ask(ask, ID).err().unwrap();
        assert!(ask(Ask::Begin).contains("did not respond"));
        assert!(ask(Ask::GoOn).contains("begin again"));
    }

    #[test]
    fn without_a_record_a_disk_goes_at_once() {
        let moving = moving();
        let mover = moving.ask(Ask::Begin, ID).unwrap();
        mover.take_over().unwrap();
        assert_eq!(moving.taken().as_deref(), Some(ID));
    }
}
