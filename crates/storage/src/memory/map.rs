//! The memory of a disk: mappings in a row, so that it can grow under those who use it.

use super::pages::{PAGE, Pages};
use crate::buffers::{Direction, copy};
use fathom_core::{Extents, Op, Request, Status};
use libc::iovec;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most that one answer describes, so that it does not hold up others.
const MAX_STATUS: u64 = 128 << 20;

/// How often it can grow beyond what is mapped: mostly twice as far each time.
const MORE: usize = 64;

/// Zeroed private memory, which is a part of the disk.
struct Part {
    base: *mut u8,
    /// Its bytes of the disk, from the start of a page to the end of one.
    range: Range<u64>,
}

// SAFETY: the mapping lives as long as the value, and its bytes are a disk's
// sectors: read and written through raw pointers only, never borrowed. Guests
// that race on a sector get what such guests get from a disk.
unsafe impl Send for Part {}
// SAFETY: as for Send.
unsafe impl Sync for Part {}

pub(super) struct Map {
    first: Part,
    more: [OnceLock<Part>; MORE],
    /// The disk's, up to what is mapped.
    len: AtomicU64,
    /// Where the kernel says which pages there are, if it does.
    pages: Option<Pages>,
}

impl Map {
    /// `len` is not 0.
    pub(super) fn new(len: u64) -> io::Result<Map> {
        Ok(Map {
            first: Part::new(0, len)?,
            more: [const { OnceLock::new() }; MORE],
            len: len.into(),
            pages: Pages::open(),
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Requests have to end there from now on. It is mapped up to there.
    pub(super) fn set_len(&self, len: u64) {
        self.len.store(len, Ordering::Release);
    }

    /// Maps `len` bytes at least. One thread at a time.
    pub(super) fn grow(&self, len: u64) -> io::Result<()> {
        let mapped = self.parts().last().map_or(0, |part| part.range.end);
        if len <= mapped {
            return Ok(());
        }
        let free = self.more.iter().find(|part| part.get().is_none());
        let free = free.ok_or(io::ErrorKind::OutOfMemory)?;
        let least = len - mapped;
        let part = Part::new(mapped, least.max(mapped));
        let part = part.or_else(|_| Part::new(mapped, least))?;
        let set = free.set(part);
        debug_assert!(set.is_ok());
        Ok(())
    }

    /// The bytes, which no request is for, become zeroes.
    pub(super) fn clear(&self, range: Range<u64>) {
        for (at, len) in self.pieces(range) {
            // What is not given back is cleared.
            // SAFETY: the piece is mapped.
            unsafe {
                if zero(at, len).is_err() {
                    at.write_bytes(0, len as usize);
                }
            }
        }
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let more = self.more.iter().map_while(OnceLock::get);
        std::iter::once(&self.first).chain(more)
    }

    /// Where the bytes of a range are that is mapped.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (*mut u8, u64)> {
        self.parts().filter_map(move |part| {
            let start = range.start.max(part.range.start);
            let end = range.end.min(part.range.end);
            (start < end).then(|| (part.at(start), end - start))
        })
    }

    /// The request's range, or EIO when it is not of this disk.
    #[inline]
    fn range(&self, request: &Request) -> Result<Range<u64>, i32> {
        match request.at.checked_add(request.len) {
            Some(end) if end <= self.len.load(Ordering::Acquire) => Ok(request.at..end),
            _ => Err(libc::EIO),
        }
    }

    #[inline]
    pub(super) fn serve(&self, request: &Request) -> Result<(), i32> {
        match request.op {
            Op::Read | Op::Write => self.copy(request),
            Op::Flush => Ok(()),
            Op::Discard | Op::WriteZeroes => self.zero(request),
            Op::BlockStatus => self.block_status(request),
        }
    }

    /// Pages that nobody has written to are holes.
    #[cold]
    fn block_status(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        let Some((first, len)) = self.pieces(range).next() else {
            return Ok(());
        };
        let first = first.addr() as u64;
        // SAFETY: the request is in flight.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let end = first + len.min(MAX_STATUS);
        let pages = first & !(PAGE - 1)..end.next_multiple_of(PAGE);
        let known = self.pages.as_ref().map(|map| {
            map.look(pages, |has_data, range| {
                let status = match has_data {
                    true => Status::DATA,
                    false => Status::HOLE,
                };
                out.push(status, range.end - range.start.max(first))
            })
        });
        if known.is_none_or(|known| known.is_err()) && out.left() == request.len {
            out.push(Status::DATA, len);
        }
        Ok(())
    }

    #[inline]
    fn copy(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        if range.end > self.first.range.end {
            return self.copy_pieces(request, range);
        }
        let mut at = self.first.at(range.start);
        let mut left = request.len as usize;
        for segment in &request.segments {
            let (buffer, len) = (segment.iov_base.cast::<u8>(), segment.iov_len);
            left = left.checked_sub(len).ok_or(libc::EINVAL)?;
            // SAFETY: the source vouches for its segments; `at` with the rest
            // of the range behind it lies in the mapping, which no guest
            // memory overlaps.
            unsafe {
                match request.op {
                    Op::Read => std::ptr::copy_nonoverlapping(at, buffer, len),
                    _ => std::ptr::copy_nonoverlapping(buffer, at, len),
                }
                at = at.add(len);
            }
        }
        Ok(())
    }

    /// Of a disk that has grown.
    fn copy_pieces(&self, request: &Request, range: Range<u64>) -> Result<(), i32> {
        let there: usize = request.segments.iter().map(|s| s.iov_len).sum();
        if there as u64 != request.len {
            return Err(libc::EINVAL);
        }
        let direction = match request.op {
            Op::Read => Direction::ToSegments,
            _ => Direction::FromSegments,
        };
        let mut done = 0;
        for (at, len) in self.pieces(range) {
            let piece = iovec {
                iov_base: at.cast(),
                iov_len: len as usize,
            };
            // SAFETY: the source vouches for its segments, and the piece is
            // mapped.
            unsafe { copy(piece, &request.segments, done, direction) };
            done += len;
        }
        Ok(())
    }

    fn zero(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        // SAFETY: the pieces are mapped.
        self.pieces(range)
            .try_for_each(|(at, len)| unsafe { zero(at, len) })
    }
}

/// Gives whole pages back and clears the edges.
///
/// # Safety
/// The bytes are those of a private mapping.
unsafe fn zero(start: *mut u8, len: u64) -> Result<(), i32> {
    let head = (start.addr().next_multiple_of(PAGE as usize) - start.addr()) as u64;
    let tail = (start.addr() as u64 + len) % PAGE;
    // SAFETY: all pieces lie in the range.
    unsafe {
        if head + tail >= len {
            start.write_bytes(0, len as usize);
            return Ok(());
        }
        start.write_bytes(0, head as usize);
        let pages = start.add(head as usize).cast::<c_void>();
        let advised = madvise(pages, (len - head - tail) as usize, Advice::LinuxDontNeed);
        let end = start.add((len - tail) as usize);
        end.write_bytes(0, tail as usize);
        advised.map_err(|error| error.raw_os_error())
    }
}

impl Part {
    fn new(start: u64, len: u64) -> io::Result<Part> {
        let len = len.checked_next_multiple_of(PAGE);
        let len = len.ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Part {
            base: base.cast(),
            range: start..start + len,
        })
    }

    /// A byte of the disk that is in it, or its end.
    #[inline]
    fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset >= self.range.start && offset <= self.range.end);
        // SAFETY: it lies within the mapping or at its end.
        unsafe { self.base.add((offset - self.range.start) as usize) }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let len = self.range.end - self.range.start;
        // SAFETY: the mapping is this value's own, and nobody uses it now.
        let unmapped = unsafe { munmap(self.base.cast(), len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}
