//! Memory that outlives this process.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Bytes that a front-end keeps for any disk, whatever that wants: another one may take its place. A multiple of 8,
/// and part of what servers before and after this one agree on.
pub const KEEPSAKE_ROOM: u64 = (1 << 20) + 64;

/// Memory that a front-end keeps for as long as its guest runs, and hands to
/// the process that comes after one that was killed. A disk keeps there what
/// it has told the guest to be done and what is not in its file yet.
///
/// The front-end can write to it at any time: nothing in it can be trusted.
#[derive(Clone)]
pub struct Keepsake {
    base: NonNull<AtomicU64>,
    words: usize,
    /// Keeps it mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it is an array of atomics that the owner, which can be shared, keeps.
unsafe impl Send for Keepsake {}
// SAFETY: as for Send.
unsafe impl Sync for Keepsake {}

impl Keepsake {
    /// # Safety
    /// `base` is aligned to 8 bytes, and `words` words from there on stay
    /// readable and writable while `owner` lives.
    pub unsafe fn new(
        base: NonNull<u8>,
        words: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Keepsake {
        Keepsake {
            base: base.cast(),
            words,
            _owner: owner,
        }
    }

    /// All of it.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: as `new` was promised; atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}
