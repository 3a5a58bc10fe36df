//! Whether an image in use has metadata that is not durable.
//!
//! Both facts are in one word, so that one load sees a consistent pair. Read one after the other, a
//! write-back that fails in between (it sets "dirty" and clears "writing") would look like a clean
//! image.

use std::sync::atomic::{AtomicU32, Ordering};

/// Metadata in memory differs from the file.
const DIRTY: u32 = 1;
/// A write-back has taken what was dirty and has not ended.
const WRITING: u32 = 2;

/// The state of an image's metadata. `DIRTY` changes only under the lock of the image's state.
///
/// Memory order: a task that changes an entry sets `DIRTY` first. Then it publishes the entry with
/// a release store. A reader that finds the entry with an acquire load therefore sees this word as
/// it was set then, or a later value. The word becomes 0 again only at the end of a write-back that
/// had copied the entry under the same lock.
#[derive(Debug, Default)]
pub(super) struct DirtyState(AtomicU32);

impl DirtyState {
    /// Returns whether a flush would have to write metadata.
    pub(super) fn is_dirty(&self) -> bool {
        self.0.load(Ordering::Acquire) & DIRTY != 0
    }

    /// Returns whether every change published before this call is durable.
    ///
    /// To decide about an entry, call this after reading the entry. (Acquire pairs with the release
    /// of `end_write_back`: what was durable by then is durable for the caller, too.)
    #[inline]
    pub(super) fn is_clean(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Marks the metadata as dirty.
    ///
    /// The caller holds the lock of the image's state and has not yet published the change. (The
    /// plain load is exact, since every change of `DIRTY` happens under that lock. An earlier
    /// change therefore happened before this call.)
    pub(super) fn set(&self) {
        if self.0.load(Ordering::Relaxed) & DIRTY == 0 {
            self.0.fetch_or(DIRTY, Ordering::Release);
        }
    }

    /// Starts a write-back: not dirty, but being written.
    ///
    /// The caller copies the dirty metadata under the same lock of the image's state. Only one
    /// write-back may be in progress at a time.
    pub(super) fn begin_write_back(&self) {
        self.0.store(WRITING, Ordering::Release);
    }

    /// Ends a write-back; all that it has copied is now durable, or marked dirty again.
    pub(super) fn end_write_back(&self) {
        self.0.fetch_and(!WRITING, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_clean_only_after_its_write_back_has_ended() {
        let state = DirtyState::default();
        assert!(state.is_clean());
        state.set();
        assert!(state.is_dirty() && !state.is_clean());
        state.begin_write_back();
        assert!(!state.is_dirty() && !state.is_clean());
        state.end_write_back();
        assert!(state.is_clean());
    }

    #[test]
    fn failed_write_back_leaves_the_image_dirty() {
        let state = DirtyState::default();
        state.set();
        state.begin_write_back();
        state.set();
        state.end_write_back();
        assert!(state.is_dirty() && !state.is_clean());
    }
}
