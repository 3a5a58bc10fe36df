//! Whether an image in use has metadata that is not durable.
//!
//! Both facts are in one word, so that one load sees a consistent pair. Read one after the other, a write-back that
//! fails in between (it sets "dirty" and clears "writing") would look like a clean image.

use std::sync::atomic::{AtomicU32, Ordering};

/// Metadata in memory differs from the file.
const DIRTY: u32 = 1;
/// A write-back has taken what was dirty and has not ended.
const WRITING: u32 = 2;

/// The state of an image's metadata. `DIRTY` changes only under the lock of the image's state.
///
/// Memory order: whoever changes an entry sets `DIRTY` first and publishes the entry afterwards, by a release store.
/// A reader that finds the entry by an acquire load therefore reads this word as it was set then, or as it became
/// later. It became 0 later only by the end of a write-back that had copied the entry under the same lock.
#[derive(Debug, Default)]
pub(super) struct DirtyState(AtomicU32);

impl DirtyState {
    /// Whether a flush would have to write metadata.
    pub(super) fn is_dirty(&self) -> bool {
        self.0.load(Ordering::Acquire) & DIRTY != 0
    }

    /// Whether every change published before this call is durable. To decide about an entry, ask after reading it.
    /// (Acquire pairs with the release of `end_write_back`: what was durable by then is so for the caller, too.)
    #[inline]
    pub(super) fn is_clean(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Under the lock of the image's state, before the change is published. (The plain load is exact: all who set
    /// or clear `DIRTY` hold that lock. Whoever set it earlier happened before the caller by the lock.)
    pub(super) fn set(&self) {
        if self.0.load(Ordering::Relaxed) & DIRTY == 0 {
            self.0.fetch_or(DIRTY, Ordering::Release);
        }
    }

    /// Under the lock of the image's state, together with copying what is dirty. One write-back at a time.
    pub(super) fn begin_write_back(&self) {
        self.0.store(WRITING, Ordering::Release);
    }

    /// What the write-back has copied is durable, or is dirty again.
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
