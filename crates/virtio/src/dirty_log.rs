//! The dirty log of a live migration (vhost-user, "Migration").

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

/// Size in bytes of the pages that one bit of the log represents (VHOST_LOG_PAGE).
pub const PAGE_SIZE: u64 = 4096;

/// A bitmap of the guest pages that this process has written, shared with the front-end.
pub struct DirtyLog {
    bytes: NonNull<u8>,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the bitmap is accessed only atomically and kept by `_owner`.
unsafe impl Send for DirtyLog {}
// SAFETY: as above.
unsafe impl Sync for DirtyLog {}

impl DirtyLog {
    /// Wraps a log of `len` bytes, each for eight pages, beginning at guest address 0.
    ///
    /// # Safety
    /// `bytes` is the start of a readable and writable mapping of at least `len` bytes. The mapping
    /// stays in place while `owner` lives, and this process accesses it only atomically.
    pub unsafe fn new(
        bytes: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> DirtyLog {
        DirtyLog {
            bytes,
            len,
            _owner: owner,
        }
    }

    /// Returns whether the log has a bit for each page below `gpa`.
    pub fn covers(&self, gpa: u64) -> bool {
        gpa.div_ceil(PAGE_SIZE * 8) <= self.len as u64
    }

    /// Records that `len` bytes from guest address `gpa` were written. Must be called after the
    /// write: otherwise the front-end could send the page and clear its bit before the write. Pages
    /// beyond the log are ignored.
    pub fn mark(&self, gpa: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = gpa.saturating_add(len - 1) / PAGE_SIZE;
        // The write must precede the load of the bit. Otherwise the front-end could clear a bit
        // that this function saw as set, and then miss the write.
        fence(Ordering::SeqCst);
        for page in gpa / PAGE_SIZE..=last {
            let byte = page / 8;
            if byte >= self.len as u64 {
                return;
            }
            // SAFETY: within the bitmap, which is accessed only atomically.
            let byte = unsafe { AtomicU8::from_ptr(self.bytes.as_ptr().add(byte as usize)) };
            let bit = 1 << (page % 8);
            if byte.load(Ordering::Relaxed) & bit == 0 {
                byte.fetch_or(bit, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pages that are set in a log of two bytes after `marks`.
    fn marked(marks: &[(u64, u64)]) -> Vec<usize> {
        // The buffer has another byte after the log, which must stay clear.
        let bytes = Arc::new([const { AtomicU8::new(0) }; 3]);
        let base = NonNull::new(bytes.as_ptr() as *mut u8).unwrap();
        // SAFETY: atomics that `owner` keeps.
        let log = unsafe { DirtyLog::new(base, 2, bytes.clone()) };
        marks.iter().for_each(|(gpa, len)| log.mark(*gpa, *len));
        let bit = |page: &usize| bytes[page / 8].load(Ordering::Relaxed) >> (page % 8) & 1 == 1;
        (0..24).filter(bit).collect()
    }

    #[test]
    fn every_page_that_is_touched_is_marked_and_no_other() {
        assert_eq!(marked(&[(0, 1)]), [0]);
        assert_eq!(marked(&[(4095, 1)]), [0]);
        assert_eq!(marked(&[(4095, 2)]), [0, 1]);
        assert_eq!(marked(&[(4096, 4096), (4096, 4096)]), [1]);
        assert_eq!(marked(&[(7 * 4096 + 1, 8192)]), [7, 8, 9]);
        assert!(marked(&[(4096, 0)]).is_empty());
        assert_eq!(marked(&[(15 * 4096, 100_000)]), [15]);
        assert!(marked(&[(16 * 4096, 1), (u64::MAX, 1)]).is_empty());
        assert!(marked(&[(u64::MAX, u64::MAX)]).is_empty());
    }

    #[test]
    fn a_log_covers_what_it_has_bits_for() {
        let bytes = Arc::new([const { AtomicU8::new(0) }; 2]);
        let base = NonNull::new(bytes.as_ptr() as *mut u8).unwrap();
        // SAFETY: atomics that `owner` keeps.
        let log = unsafe { DirtyLog::new(base, 2, bytes.clone()) };
        assert!(log.covers(0));
        assert!(log.covers(16 * 4096));
        assert!(!log.covers(16 * 4096 + 1));
        assert!(!log.covers(u64::MAX));
    }
}
