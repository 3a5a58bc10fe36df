//! Aligned buffers for requests that direct I/O does not accept as they are.

use libc::iovec;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;

/// Size of each buffer in bytes, a multiple of every block size. Longer requests pass through a
/// buffer in pieces.
pub(crate) const BUFFER_LEN: usize = 256 << 10;

/// Number of buffers per worker. Requests wait while none is free.
const BUFFERS: usize = 64;

/// The index of a buffer in its pool. Not `Clone`: the holder returns it to the pool.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Buffer(u16);

impl Buffer {
    pub(crate) fn number(&self) -> usize {
        usize::from(self.0)
    }
}

/// A worker's buffers. A buffer that is never used occupies no memory.
pub(crate) struct Buffers {
    base: *mut u8,
    free: Vec<Buffer>,
}

impl Buffers {
    pub(crate) fn new() -> io::Result<Buffers> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                BUFFERS * BUFFER_LEN,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Buffers {
            base: base.cast(),
            free: (0..BUFFERS as u16).rev().map(Buffer).collect(),
        })
    }

    /// Number of free buffers.
    pub(crate) fn len(&self) -> usize {
        self.free.len()
    }

    /// Takes the most recently used free buffer, if there is one.
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.free.pop()
    }

    pub(crate) fn put(&mut self, buffer: Buffer) {
        self.free.push(buffer);
    }

    /// Returns the iovec of `len` bytes of a buffer from `start` on.
    pub(crate) fn part(&self, buffer: &Buffer, start: usize, len: usize) -> iovec {
        assert!(start + len <= BUFFER_LEN);
        // SAFETY: the buffer lies in the mapping and the part in the buffer.
        let base = unsafe { self.base.add(usize::from(buffer.0) * BUFFER_LEN + start) };
        iovec {
            iov_base: base.cast(),
            iov_len: len,
        }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; the engine is drained before the channel that
        // owns the buffers is dropped.
        let unmapped = unsafe { munmap(self.base.cast(), BUFFERS * BUFFER_LEN) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_and_come_back() {
        let mut pool = Buffers::new().expect("memory");
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), BUFFERS);
        let mut starts: Vec<_> = taken
            .iter()
            .map(|b| pool.part(b, 0, BUFFER_LEN).iov_base as usize)
            .collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|w| w[1] - w[0] >= BUFFER_LEN));
        assert!(starts.iter().all(|s| s % 4096 == 0));
        taken.into_iter().for_each(|b| pool.put(b));
        assert!(pool.take().is_some());
    }
}
