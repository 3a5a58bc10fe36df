//! Memory for direct I/O.

use libc::iovec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ptr::NonNull;

/// Alignment in bytes, which suits direct I/O of any block size.
const ALIGN: usize = 4096;

/// Initialised memory at a fixed address, aligned for direct I/O.
#[derive(Debug)]
pub struct AlignedBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: this value alone owns the allocation, like a Box.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    /// Allocates `len` zeroes, or 1 if `len` is 0. Ends the process if there is no memory.
    pub fn new(len: usize) -> AlignedBuffer {
        let new = AlignedBuffer::try_new(len);
        new.unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()))
    }

    /// Allocates `len` zeroes, or 1 if `len` is 0. Fails if there is no memory.
    pub fn try_new(len: usize) -> io::Result<AlignedBuffer> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let layout = Layout::from_size_align(len.max(1), ALIGN).map_err(|_| no_memory())?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(no_memory)?;
        Ok(AlignedBuffer { base, layout })
    }

    /// Returns the length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Returns the memory. No operation that writes to it may be in flight.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory belongs to this value, is initialised, and has this size.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len()) }
    }

    /// Returns the memory. No operation that uses it may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; in addition, the caller has exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) }
    }

    /// Returns an iovec of the first `len` bytes, through which an operation may read or write.
    pub fn iovec(&self, len: usize) -> iovec {
        assert!(len <= self.len());
        iovec {
            iov_base: self.base.as_ptr().cast(),
            iov_len: len,
        }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
