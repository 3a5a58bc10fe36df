//! The waiting workers of a disk.

use fathom_core::EventNotifier;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Notifiers of waiting workers; dropped ones are skipped.
#[derive(Default)]
pub(crate) struct Notifiers(Mutex<Vec<Weak<EventNotifier>>>);

impl Notifiers {
    pub(crate) fn add(&self, notifier: &Arc<EventNotifier>) {
        let mut notifiers = self.0.lock();
        notifiers.retain(|notifier| notifier.strong_count() > 0);
        notifiers.push(Arc::downgrade(notifier));
    }

    pub(crate) fn notify(&self) {
        for notifier in self.0.lock().iter().filter_map(Weak::upgrade) {
            notifier.notify();
        }
    }
}
