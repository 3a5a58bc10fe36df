//! Buffers aligned to pages, for direct I/O.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;

/// A private mapping of whole pages, initially zero.
#[derive(Debug)]
pub struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and is ordinary memory.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps `len` bytes, which must not be zero.
    pub fn new(len: usize) -> io::Result<Pages> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        Ok(Pages {
            base: base.cast(),
            len,
        })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len` bytes and lives as long as the value.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: see `bytes`; `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, to which no reference exists any more.
        let unmapped = unsafe { munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
