//! Buffers for I/O, aligned for O_DIRECT.

use fathom_core::AlignedBuffer;
use libc::iovec;
use std::cell::RefCell;
use std::rc::Rc;

const ALIGN: usize = 4096;

/// Maximum size in bytes of a buffer that is kept for reuse; sizes are powers of two.
const MAX_KEPT: usize = 256 << 10;

/// Maximum number of buffers kept of a size: as many as a worker has in flight. Large sizes are
/// limited by `KEPT_BYTES`.
const KEPT: usize = 128;
const KEPT_BYTES: usize = 8 << 20;

const SIZES: usize = (MAX_KEPT / ALIGN).ilog2() as usize + 1;

/// A worker's free buffers.
#[derive(Default)]
pub(super) struct Pool([RefCell<Vec<AlignedBuffer>>; SIZES]);

impl Pool {
    /// Returns a buffer of `len` bytes with unspecified contents.
    pub(super) fn take(self: &Rc<Self>, len: usize) -> Buf {
        let kept = self.kept(len).and_then(|kept| kept.borrow_mut().pop());
        Buf {
            memory: kept.or_else(|| Some(allocate(len))),
            len,
            pool: Some(self.clone()),
        }
    }

    fn kept(&self, len: usize) -> Option<&RefCell<Vec<AlignedBuffer>>> {
        let size = len.max(ALIGN).next_power_of_two();
        self.0.get((size / ALIGN).ilog2() as usize)
    }

    fn put(&self, memory: AlignedBuffer) {
        if let Some(kept) = self.kept(memory.len())
            && kept.borrow().len() < KEPT.min(KEPT_BYTES / memory.len())
        {
            kept.borrow_mut().push(memory);
        }
    }
}

/// Allocates a buffer of at least `len` bytes, whose size is one that the pool keeps.
fn allocate(len: usize) -> AlignedBuffer {
    AlignedBuffer::new(len.max(ALIGN).next_power_of_two())
}

/// A buffer without a pool, which may be sent to another thread.
pub(super) struct Loose {
    memory: AlignedBuffer,
    len: usize,
}

impl Loose {
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.len]
    }

    /// Returns the buffer, whose memory goes back to this pool when it is dropped.
    pub(super) fn back(self, pool: &Rc<Pool>) -> Buf {
        Buf {
            memory: Some(self.memory),
            len: self.len,
            pool: Some(pool.clone()),
        }
    }
}

/// A buffer to read into or to write from.
pub(super) struct Buf {
    /// `Some`, except while the buffer is dropped.
    memory: Option<AlignedBuffer>,
    len: usize,
    /// Pool that the memory goes back to.
    pool: Option<Rc<Pool>>,
}

impl Buf {
    /// Creates a buffer of zeroes.
    pub(super) fn new(len: usize) -> Buf {
        Buf {
            memory: Some(allocate(len)),
            len,
            pool: None,
        }
    }

    pub(super) fn loosen(mut self) -> Loose {
        let memory = self.memory.take();
        Loose {
            memory: memory.expect("it is not being dropped"),
            len: self.len,
        }
    }

    fn memory(&self) -> &AlignedBuffer {
        self.memory.as_ref().expect("it is not being dropped")
    }

    /// Returns the bytes. Operations that write to them own the buffer until they are complete.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory().bytes()[..self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("it is not being dropped");
        &mut memory.bytes_mut()[..self.len]
    }

    /// Returns the whole buffer as an iovec.
    pub(super) fn iovec(&self) -> iovec {
        self.memory().iovec(self.len)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let (Some(pool), Some(memory)) = (&self.pool, self.memory.take()) {
            pool.put(memory);
        }
    }
}
