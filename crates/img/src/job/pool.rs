//! A bounded number of buffers.

use fathom_stack::Pages;
use std::io;

/// Buffers of one size, made when they are first needed.
#[derive(Debug)]
pub(crate) struct Pool {
    len: usize,
    free: Vec<Pages>,
    /// That may still be made.
    left: usize,
}

impl Pool {
    /// Of `count` buffers of `len` bytes.
    pub(crate) fn new(len: usize, count: usize) -> Pool {
        Pool {
            len,
            free: Vec::with_capacity(count),
            left: count,
        }
    }

    /// One of them, if there is one left; what it holds is what its last user left there.
    pub(crate) fn take(&mut self) -> io::Result<Option<Pages>> {
        if let Some(pages) = self.free.pop() {
            return Ok(Some(pages));
        }
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        Pages::new(self.len).map(Some)
    }

    pub(crate) fn put(&mut self, pages: Pages) {
        self.free.push(pages);
    }
}
