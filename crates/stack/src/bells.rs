//! Eventfds that wake waiting workers.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The eventfds of waiting workers; dropped ones are skipped.
#[derive(Default)]
pub(crate) struct Bells(Mutex<Vec<Weak<OwnedFd>>>);

impl Bells {
    fn bells(&self) -> MutexGuard<'_, Vec<Weak<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, bell: &Arc<OwnedFd>) {
        self.bells().push(Arc::downgrade(bell));
    }

    pub(crate) fn ring(&self) {
        for bell in self.bells().iter().filter_map(Weak::upgrade) {
            // Increments of one cannot overflow an eventfd's counter.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
    }
}
