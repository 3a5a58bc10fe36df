//! Settings that can change while requests are served.

use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Settings as the thread that changes them sees them.
pub(crate) struct Live<T> {
    current: Mutex<Arc<T>>,
    generation: AtomicU64,
}

impl<T> Live<T> {
    pub(crate) fn new(settings: T) -> Arc<Live<T>> {
        Arc::new(Live {
            current: Mutex::new(Arc::new(settings)),
            generation: AtomicU64::new(0),
        })
    }

    pub(crate) fn get(&self) -> Arc<T> {
        self.current.lock().clone()
    }

    pub(crate) fn set(&self, settings: T) {
        let mut current = self.current.lock();
        *current = Arc::new(settings);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns a view for one worker.
    pub(crate) fn view(self: &Arc<Self>) -> View<T> {
        View {
            generation: self.generation.load(Ordering::Acquire),
            current: self.get(),
            live: self.clone(),
        }
    }
}

/// Settings as one worker sees them: unchanged until the worker refreshes them.
pub(crate) struct View<T> {
    live: Arc<Live<T>>,
    current: Arc<T>,
    generation: u64,
}

impl<T> View<T> {
    /// Adopts new settings. Returns true if there are any.
    #[inline]
    pub(crate) fn refresh(&mut self) -> bool {
        let generation = self.live.generation.load(Ordering::Acquire);
        let changed = generation != self.generation;
        if changed {
            self.generation = generation;
            self.current = self.live.get();
        }
        changed
    }
}

impl<T> Deref for View<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.current
    }
}
