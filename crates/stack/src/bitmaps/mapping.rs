//! The memory mapping of a bitmap's bits.

use super::header::tell_lost;
use fathom_sigbus::{Alarm, Guarded, Spare};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
use rustix::param::page_size;
use std::fs::File;
use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A shared mapping of the file: marks survive even if this process is killed.
pub(super) struct Mapping {
    start: *mut AtomicU64,
    words: usize,
    /// Length in bytes.
    len: usize,
    file: Arc<File>,
    lost: Arc<Lost>,
    guarded: Option<Guarded>,
}

/// Records that the file was truncated or could not be read.
struct Lost {
    is: AtomicBool,
    file: Arc<File>,
    spare: Spare,
}

impl Alarm for Lost {
    fn raise(&self) {
        self.is.store(true, Ordering::Relaxed);
        tell_lost(&self.file);
    }

    fn spare(&self) -> &Spare {
        &self.spare
    }
}

// SAFETY: the pointer refers to atomics, which stay mapped while this value lives.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `words` words from `offset` on, which must be a multiple of any page size.
    pub(super) fn new(file: &Arc<File>, offset: u64, words: usize) -> io::Result<Mapping> {
        let len = (words.max(1) * size_of::<AtomicU64>()).next_multiple_of(page_size());
        let lost = Arc::new(Lost {
            is: AtomicBool::new(false),
            file: file.clone(),
            spare: Spare::new()?,
        });
        // SAFETY: the kernel chooses the address, so the mapping replaces nothing.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &**file,
                offset,
            )
        }?;
        let mut mapping = Mapping {
            start: start.cast(),
            words,
            len,
            file: file.clone(),
            lost: lost.clone(),
            guarded: None,
        };
        let guarded = Guarded::new(start.cast_const().cast(), len, page_size(), lost)?;
        mapping.guarded = Some(guarded);
        Ok(mapping)
    }

    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the memory is mapped while this value lives, aligned to a page, and long enough.
        // Other processes may write any bits there; if the file is truncated, other memory takes
        // its place.
        unsafe { std::slice::from_raw_parts(self.start, self.words) }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.is.load(Ordering::Relaxed)
    }

    /// Makes all marks durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is the one that was mapped.
        unsafe { msync(self.start.cast(), self.len, MsyncFlags::SYNC) }?;
        self.file.sync_data()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.guarded.take());
        // SAFETY: the range is the one that was mapped, and no reference to it exists any more.
        let unmapped = unsafe { munmap(self.start.cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
