//! Buffers for I/O, aligned for O_DIRECT.

use libc::iovec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;

const ALIGN: usize = 4096;

/// Maximum size in bytes of a buffer that is kept for reuse; sizes are powers of two.
const MAX_KEPT: usize = 256 << 10;

/// Maximum number of buffers kept of a size: as many as a worker has in flight. Large sizes are
/// limited by `KEPT_BYTES`.
const KEPT: usize = 128;
const KEPT_BYTES: usize = 8 << 20;

const SIZES: usize = (MAX_KEPT / ALIGN).ilog2() as usize + 1;

/// One worker's free buffers.
#[derive(Default)]
pub(super) struct Pool([RefCell<Vec<Memory>>; SIZES]);

impl Pool {
    /// Returns a buffer of `len` bytes with unspecified contents.
    pub(super) fn take(self: &Rc<Self>, len: usize) -> Buf {
        let kept = self.kept(len).and_then(|kept| kept.borrow_mut().pop());
        Buf {
            memory: kept.or_else(|| Some(Memory::new(len))),
            len,
            pool: Some(self.clone()),
        }
    }

    fn kept(&self, len: usize) -> Option<&RefCell<Vec<Memory>>> {
        let size = len.max(ALIGN).next_power_of_two();
        self.0.get((size / ALIGN).ilog2() as usize)
    }

    fn put(&self, memory: Memory) {
        if let Some(kept) = self.kept(memory.layout.size())
            && kept.borrow().len() < KEPT.min(KEPT_BYTES / memory.layout.size())
        {
            kept.borrow_mut().push(memory);
        }
    }
}

/// An allocation whose bytes are initialised.
struct Memory {
    base: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    fn new(len: usize) -> Memory {
        let size = len.max(ALIGN).next_power_of_two();
        let layout = Layout::from_size_align(size, ALIGN);
        let layout = layout.expect("requests and tables are small");
        // SAFETY: the layout's size is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Memory { base, layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

// SAFETY: this value alone owns the allocation, like a Box.
unsafe impl Send for Memory {}

/// A buffer without a pool, which may be sent to another thread.
pub(super) struct Loose {
    memory: Memory,
    len: usize,
}

impl Loose {
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this value owns the memory, which is initialised.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base.as_ptr(), self.len) }
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
    memory: Option<Memory>,
    len: usize,
    /// Pool that the memory goes back to.
    pool: Option<Rc<Pool>>,
}

impl Buf {
    /// Creates a buffer of zeroes.
    pub(super) fn new(len: usize) -> Buf {
        Buf {
            memory: Some(Memory::new(len)),
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

    fn base(&self) -> *mut u8 {
        let memory = self.memory.as_ref();
        memory.expect("it is not being dropped").base.as_ptr()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: this value owns the memory, which is initialised. Operations that write to it own
        // the buffer until they are complete.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; in addition, the caller has exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }

    /// Returns the whole buffer as an iovec.
    pub(super) fn iovec(&self) -> iovec {
        iovec {
            iov_base: self.base().cast(),
            iov_len: self.len,
        }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let (Some(pool), Some(memory)) = (&self.pool, self.memory.take()) {
            pool.put(memory);
        }
    }
}
