//! Work of a worker that belongs to no request: changes of the disk's size.

use super::io::Errno;
use super::task::Ready;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};

/// Why a resize failed. The disk keeps its size.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    /// The disk has all of its data.
    Unchanged(Errno),
    /// Clusters beyond the requested end may already be unlinked.
    PartlyCut(Errno),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Unchanged(errno)
    }
}

/// A change of the disk's size.
pub(super) struct Job {
    /// New size in bytes.
    pub(super) size: u64,
    /// Whether the data file is a raw image by itself, so that new clusters are allocated in it.
    pub(super) raw_data_file: bool,
    pub(super) outcome: SyncSender<Result<(), Failure>>,
}

/// Passes a job from the thread that wants it done to one of the workers.
#[derive(Default)]
pub(super) struct Jobs {
    waits: AtomicBool,
    job: Mutex<Option<Job>>,
    workers: Mutex<Vec<Weak<Ready>>>,
}

impl Jobs {
    /// Registers a worker, which looks for a job whenever it is woken.
    pub(super) fn register(&self, worker: &Arc<Ready>) {
        let mut workers = locked(&self.workers);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(worker));
    }

    /// Posts a job and wakes the workers; the first one that looks does it. Only one job may be in
    /// progress at a time.
    pub(super) fn post(&self, job: Job) {
        *locked(&self.job) = Some(job);
        self.waits.store(true, Ordering::SeqCst);
        let workers = locked(&self.workers);
        let there = workers.iter().filter_map(Weak::upgrade);
        there.for_each(|worker| worker.ring());
    }

    /// Returns the job for a worker that was woken, if no other worker has taken it.
    pub(super) fn take(&self) -> Option<Job> {
        if !self.waits.load(Ordering::Relaxed) || !self.waits.swap(false, Ordering::SeqCst) {
            return None;
        }
        locked(&self.job).take()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
