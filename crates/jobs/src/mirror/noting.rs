//! Records the changes by users.

use crate::source::Source;
use fathom_core::{Changes, WorkerHandle};
use fathom_stack::{Brake, Tap};
use parking_lot::Mutex;
use std::sync::Arc;

/// Records changes by users and can throttle their writes, until it is dropped.
pub(super) struct Noting {
    pub(super) brake: Arc<Brake>,
    tap: Arc<Tap>,
    workers: Arc<[WorkerHandle]>,
}

impl Noting {
    /// Starts to record in `noted` each write that completes from now on.
    ///
    /// The error is a message for the user.
    pub(super) fn begin(source: &Source, noted: &Arc<Changes>) -> Result<Noting, String> {
        let brake = Arc::<Brake>::default();
        source.tap.hold_back(&brake, &source.workers)?;
        let noting = Noting {
            brake,
            tap: source.tap.clone(),
            workers: source.workers.clone(),
        };
        noting.note(Some(noted));
        let workers = &source.workers;
        let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
        match looks.into_iter().all(|look| look.wait().is_ok()) {
            true => Ok(noting),
            false => Err("a worker did not respond".into()),
        }
    }

    fn note(&self, noted: Option<&Arc<Changes>>) {
        let note = |worker: &WorkerHandle| worker.note_changes(noted.cloned());
        self.workers.iter().for_each(note);
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        self.brake.release();
        self.note(None);
        self.tap.hold_back_no_more(&self.workers);
    }
}

/// Takes the [`Noting`] out of its mutex, so that the caller can drop it.
pub(super) fn end_of(noting: &Mutex<Option<Noting>>) -> Option<Noting> {
    noting.lock().take()
}
