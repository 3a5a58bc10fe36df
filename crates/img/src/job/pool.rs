//! A pool with a fixed maximum number of buffers.

use fathom_core::AlignedBuffer;
use std::io;

/// Buffers of one size, each allocated when it is first needed.
#[derive(Debug)]
pub(crate) struct Pool {
    len: usize,
    free: Vec<AlignedBuffer>,
    /// Number of buffers that may still be allocated.
    left: usize,
}

impl Pool {
    /// Creates a pool of `count` buffers of `len` bytes.
    pub(crate) fn new(len: usize, count: usize) -> Pool {
        Pool {
            len,
            free: Vec::with_capacity(count),
            left: count,
        }
    }

    /// Takes a buffer, or returns `None` if all are in use. The buffer still has the contents of
    /// its previous use.
    pub(crate) fn take(&mut self) -> io::Result<Option<AlignedBuffer>> {
        if let Some(pages) = self.free.pop() {
            return Ok(Some(pages));
        }
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        AlignedBuffer::try_new(self.len).map(Some)
    }

    pub(crate) fn put(&mut self, pages: AlignedBuffer) {
        self.free.push(pages);
    }
}
