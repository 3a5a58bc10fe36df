//! Memory owned by a filter, aligned for O_DIRECT.

use fathom_core::Segments;
use libc::iovec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Initialised memory at a fixed address.
pub(crate) struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
}

impl Buffer {
    /// Allocates `len` bytes, neither 0 nor a huge number.
    pub(crate) fn new(len: usize) -> Buffer {
        let layout = Layout::from_size_align(len.max(1), 4096).expect("buffers are small");
        // SAFETY: the layout's size is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else {
            handle_alloc_error(layout)
        };
        Buffer { base, layout }
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// Returns an iovec of the first `len` bytes.
    pub(crate) fn iovec(&mut self, len: usize) -> iovec {
        assert!(len <= self.len());
        iovec {
            iov_base: self.base.as_ptr().cast(),
            iov_len: len,
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory belongs to this value, is initialised, and has this size.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) }
    }

    /// Copies the buffer's contents from `from` on into the segments.
    ///
    /// # Safety
    /// The segments are valid for writes.
    pub(crate) unsafe fn copy_to(&self, from: usize, segments: &Segments) {
        let mut at = from;
        for segment in segments {
            assert!(at + segment.iov_len <= self.len());
            // SAFETY: the source range lies in the buffer. The segment is valid as required of the
            // caller, and does not overlap this memory.
            unsafe {
                let source = self.base.as_ptr().add(at);
                let target = segment.iov_base.cast::<u8>();
                target.copy_from_nonoverlapping(source, segment.iov_len);
            }
            at += segment.iov_len;
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
