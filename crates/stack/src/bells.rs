//! Whom to tell that there is something to look at.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The eventfds of those who wait, as long as they are there.
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
            // An eventfd's counter cannot overflow by ones.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
    }
}
