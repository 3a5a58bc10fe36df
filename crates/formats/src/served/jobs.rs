//! What is done by a worker though no request asks for it: changes of the disk's size.

use super::io::Errno;
use super::task::Ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A size that the disk is to get.
pub(super) struct Job {
    /// In bytes.
    pub(super) size: u64,
    /// The data file shows the disk by itself: clusters that are new are in it.
    pub(super) raw_data_file: bool,
    pub(super) outcome: SyncSender<Result<(), Errno>>,
}

/// Between whoever wants it done and the workers, one of which does it.
#[derive(Default)]
pub(super) struct Jobs {
    waits: AtomicBool,
    job: Mutex<Option<Job>>,
    workers: Mutex<Vec<Weak<Ready>>>,
}

impl Jobs {
    /// A worker will look when it is rung.
    pub(super) fn register(&self, worker: &Arc<Ready>) {
        let mut workers = locked(&self.workers);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(worker));
    }

    /// Lets a worker do it, the first that looks. One at a time.
    pub(super) fn post(&self, job: Job) {
        *locked(&self.job) = Some(job);
        self.waits.store(true, Ordering::SeqCst);
        let workers = locked(&self.workers);
        let there = workers.iter().filter_map(Weak::upgrade);
        there.for_each(|worker| worker.ring());
    }

    /// For a worker that was rung.
    pub(super) fn take(&self) -> Option<Job> {
        if !self.waits.load(Ordering::Relaxed) || !self.waits.swap(false, Ordering::SeqCst) {
            return None;
        }
        locked(&self.job).take()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
