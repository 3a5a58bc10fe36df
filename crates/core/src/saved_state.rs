//! Memory that outlives the process.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Size in bytes of the memory that a front-end keeps for each disk, a multiple of 8. The size is
/// the same for all disks, since another disk may replace a disk. All versions of the server must
/// agree on this value.
pub const SAVED_STATE_ROOM: u64 = (1 << 20) + 64;

/// Memory that a front-end keeps while its guest runs, and passes to the successor of a killed
/// process. A disk stores there the writes that it has reported to the guest as completed and that
/// are not in its file yet.
///
/// The front-end can write to the memory at any time, so its contents are not trusted.
#[derive(Clone)]
pub struct SavedState {
    base: NonNull<AtomicU64>,
    words: usize,
    /// Keeps the memory mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is an array of atomics, kept by an owner that is itself Send and Sync.
unsafe impl Send for SavedState {}
// SAFETY: as for Send.
unsafe impl Sync for SavedState {}

impl SavedState {
    /// Wraps mapped memory.
    ///
    /// # Safety
    /// `base` is aligned to 8 bytes, and the `words` words from there stay readable and writable
    /// while `owner` lives.
    pub unsafe fn new(
        base: NonNull<u8>,
        words: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> SavedState {
        SavedState {
            base: base.cast(),
            words,
            _owner: owner,
        }
    }

    /// Returns all words of the memory.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the caller of `new` guarantees it; atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}
