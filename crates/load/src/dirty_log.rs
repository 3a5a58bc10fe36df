//! The dirty log of a live migration, and a check that it is complete.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::error::{Error, Result};
use crate::memory::{GUEST_BASE, GuestMemory, Mapping, PAGE};

/// A dirty log: one bit per guest page, in a memfd of its own.
#[derive(Debug)]
pub struct DirtyLog {
    file: File,
    map: Mapping,
}

impl DirtyLog {
    /// Creates a clear log that covers `memory`.
    pub fn new(memory: &GuestMemory) -> Result<DirtyLog> {
        let pages = (GUEST_BASE as usize + memory.map().len()).div_ceil(PAGE);
        let len = pages.div_ceil(8).next_multiple_of(PAGE);
        let fd = memfd_create(c"fathom-bench-log", MemfdFlags::CLOEXEC)
            .map_err(|e| Error::os("creating a memfd", e))?;
        ftruncate(&fd, len as u64).map_err(|e| Error::os("sizing a memfd", e))?;
        Ok(DirtyLog {
            map: Mapping::shared(fd.as_fd(), len, true)?,
            file: File::from(fd),
        })
    }

    /// Returns the size of the log in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the memfd, to pass it to the server.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn byte(&self, page: u64) -> (&AtomicU8, u8) {
        let at = self.map.at((page / 8) as usize, 1);
        // SAFETY: inside the mapping, which exists until `self` is dropped, and only accessed
        // atomically.
        (unsafe { AtomicU8::from_ptr(at) }, 1 << (page % 8))
    }

    fn is_set(&self, page: u64) -> bool {
        let (byte, bit) = self.byte(page);
        byte.load(Ordering::Acquire) & bit != 0
    }

    fn clear(&self, page: u64) {
        let (byte, bit) = self.byte(page);
        byte.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// Timeout for a mark to appear in an idle log. A server may mark a page shortly after it has made
/// the completion visible.
const GRACE: Duration = Duration::from_secs(1);

/// The pages that the device has written in one queue since its last check.
#[derive(Debug)]
pub struct LogCheck {
    log: Arc<DirtyLog>,
    queue: usize,
    expected: Vec<(u64, &'static str)>,
    /// Whether each page of the region is in `expected`.
    listed: Vec<bool>,
    checked: u64,
}

impl LogCheck {
    pub fn new(log: Arc<DirtyLog>, queue: usize, memory: &GuestMemory) -> LogCheck {
        LogCheck {
            log,
            queue,
            expected: Vec::new(),
            listed: vec![false; memory.map().len() / PAGE],
            checked: 0,
        }
    }

    /// Records that the device has written `len` bytes at `offset` of the region.
    pub fn expect(&mut self, offset: usize, len: usize, what: &'static str) {
        for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
            if !std::mem::replace(&mut self.listed[page], true) {
                self.expected
                    .push((GUEST_BASE / PAGE as u64 + page as u64, what));
            }
        }
    }

    /// Checks that every expected page is marked, and clears the marks for the next check. Must be
    /// called when no request is in flight.
    pub fn check(&mut self) -> Result<()> {
        let end = Instant::now() + GRACE;
        for (page, what) in self.expected.drain(..) {
            while !self.log.is_set(page) {
                if Instant::now() > end {
                    return Err(Error::DirtyLog {
                        queue: self.queue,
                        page,
                        what,
                    });
                }
                std::thread::yield_now();
            }
            self.log.clear(page);
            self.listed[(page - GUEST_BASE / PAGE as u64) as usize] = false;
            self.checked += 1;
        }
        Ok(())
    }

    /// Returns the number of pages found marked so far.
    pub fn checked(&self) -> u64 {
        self.checked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_marked_is_found_and_marks_count_once() {
        let memory = GuestMemory::new(1 << 20).unwrap();
        let log = Arc::new(DirtyLog::new(&memory).unwrap());
        let mut check = LogCheck::new(log.clone(), 3, &memory);
        let first = GUEST_BASE / PAGE as u64;
        check.expect(4096, 4097, "data");
        check.expect(5000, 1, "status");
        for page in [first + 1, first + 2] {
            let (byte, bit) = log.byte(page);
            byte.fetch_or(bit, Ordering::Relaxed);
        }
        check.check().unwrap();
        assert_eq!(check.checked(), 2);
        check.expect(8192, 1, "data");
        let e = check.check().unwrap_err().to_string();
        assert!(e.contains("0x40002 (data) of queue 3"), "{e}");
    }
}
