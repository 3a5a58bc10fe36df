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

/// One worker's buffers. A buffer that is never used occupies no memory.
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

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToSegments,
    FromSegments,
}

/// Copies between a buffer and the bytes of `segments` from `skip` on.
///
/// # Safety
/// The buffer and all segments are valid and do not overlap.
pub(crate) unsafe fn copy(buffer: iovec, segments: &[iovec], skip: u64, direction: Direction) {
    let (mut at, mut left) = (buffer.iov_base.cast::<u8>(), buffer.iov_len);
    let mut skip = skip;
    for segment in segments {
        let skipped = skip.min(segment.iov_len as u64) as usize;
        skip -= skipped as u64;
        let n = (segment.iov_len - skipped).min(left);
        let other = segment.iov_base.cast::<u8>().wrapping_add(skipped);
        // SAFETY: `n` bytes lie both in the buffer and in the segment.
        unsafe {
            match direction {
                Direction::ToSegments => std::ptr::copy_nonoverlapping(at, other, n),
                Direction::FromSegments => std::ptr::copy_nonoverlapping(other, at, n),
            }
            at = at.add(n);
        }
        left -= n;
    }
}

/// Fills `len` bytes of `segments` from `skip` on with zeroes.
///
/// # Safety
/// All segments are valid for writes.
pub(crate) unsafe fn clear(segments: &[iovec], skip: u64, len: u64) {
    let (mut skip, mut left) = (skip, len as usize);
    for segment in segments {
        let skipped = skip.min(segment.iov_len as u64) as usize;
        skip -= skipped as u64;
        let n = (segment.iov_len - skipped).min(left);
        let at = segment.iov_base.cast::<u8>().wrapping_add(skipped);
        // SAFETY: `n` bytes lie in the segment.
        unsafe { at.write_bytes(0, n) };
        left -= n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn copies_reach_the_right_bytes(
            lens in prop::collection::vec(0usize..40, 1..6),
            skip in 0usize..100,
            len in 0usize..100,
        ) {
            let total: usize = lens.iter().sum();
            let skip = skip.min(total);
            let len = len.min(total - skip);
            let mut guest: Vec<u8> = (0..total).map(|i| i as u8).collect();
            let mut at = guest.as_mut_ptr();
            let segments: Vec<iovec> = lens.iter().map(|&len| {
                let segment = iovec { iov_base: at.cast(), iov_len: len };
                at = at.wrapping_add(len);
                segment
            }).collect();
            let mut buffer = vec![0u8; len];
            let whole = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: len };
            // SAFETY: both are valid and do not overlap.
            unsafe { copy(whole, &segments, skip as u64, Direction::FromSegments) };
            prop_assert_eq!(&buffer[..], &guest[skip..skip + len]);
            buffer.fill(0xee);
            let whole = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: len };
            // SAFETY: both are valid and do not overlap.
            unsafe { copy(whole, &segments, skip as u64, Direction::ToSegments) };
            for (i, byte) in guest.iter().enumerate() {
                let inside = (skip..skip + len).contains(&i);
                prop_assert_eq!(*byte, if inside { 0xee } else { i as u8 });
            }
        }
    }
}
