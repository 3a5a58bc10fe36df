//! The memory of a disk: consecutive mappings, so that the disk can grow while in use.

use super::part::Part;
use fathom_core::segments::{Direction, clear, copy};
use fathom_core::{Extents, Op, PartState, Request, Status};
use fathom_units::cause;
use serde_json::json;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum length in bytes that one block status reply describes, so that it does not delay others.
const MAX_STATUS: u64 = 128 << 20;

/// Maximum number of mappings added by growth. Each usually doubles the mapped length.
const MORE: usize = 64;

pub(super) struct Map {
    first: Part,
    more: [OnceLock<Part>; MORE],
    /// The disk's length in bytes, at most the mapped length.
    len: AtomicU64,
}

impl Map {
    /// Maps `len` bytes; `len` is not 0.
    pub(super) fn new(len: u64) -> io::Result<Map> {
        Ok(Map {
            first: Part::new(0, len)?,
            more: [const { OnceLock::new() }; MORE],
            len: len.into(),
        })
    }

    /// Returns the files and ranges of the memory for a successor.
    pub(super) fn early_state(&self) -> io::Result<PartState> {
        let files = self.parts().flat_map(Part::files);
        let files = files.map(|file| file.try_clone_to_owned());
        let ranges: Vec<_> = self
            .parts()
            .map(|part| (part.range.start, part.range.end))
            .collect();
        Ok(PartState {
            values: json!({ "len": self.len(), "parts": ranges }),
            files: files.collect::<io::Result<_>>()?,
            is_needed: true,
        })
    }

    /// Maps the memory that a predecessor shares. The error is one line.
    pub(super) fn of(mut early_state: PartState) -> Result<Map, String> {
        let ranges = serde_json::from_value::<Vec<(u64, u64)>>(early_state.values["parts"].take());
        let ranges = ranges.map_err(|error| error.to_string())?;
        let len = early_state.number("len")?;
        let (more, mut first, mut end) = ([const { OnceLock::new() }; MORE], None, 0);
        for (number, (from, to)) in ranges.into_iter().enumerate() {
            let files: [OwnedFd; 2] = [early_state.take_file()?, early_state.take_file()?];
            let [bytes, written] = files;
            let part = Part::of(from..to, bytes, written);
            let part = part.map_err(|error| format!("cannot map its memory: {}", cause(error)))?;
            if from != end {
                return Err("its memory is not contiguous".into());
            }
            end = to;
            match number.checked_sub(1) {
                None => first = Some(part),
                Some(at) => {
                    let place = more.get(at).ok_or("its memory has too many parts")?;
                    let _ = place.set(part);
                }
            }
        }
        match first.filter(|_| (1..=end).contains(&len)) {
            Some(first) => Ok(Map {
                first,
                more,
                len: len.into(),
            }),
            None => Err("its memory is missing".into()),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Sets the length beyond which requests fail. Memory must be mapped up to `len`.
    pub(super) fn set_len(&self, len: u64) {
        self.len.store(len, Ordering::Release);
    }

    /// Maps at least `len` bytes. Callers must not call it concurrently.
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

    /// Zeroes a range, which no request may use meanwhile.
    pub(super) fn clear(&self, range: Range<u64>) {
        self.pieces(range)
            .for_each(|(part, range)| part.forget(range));
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let more = self.more.iter().map_while(OnceLock::get);
        std::iter::once(&self.first).chain(more)
    }

    /// Returns the parts of a mapped range by mapping.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (&Part, Range<u64>)> {
        self.parts().filter_map(move |part| {
            let start = range.start.max(part.range.start);
            let end = range.end.min(part.range.end);
            (start < end).then_some((part, start..end))
        })
    }

    /// Returns the request's range, or EIO if it exceeds the disk.
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

    /// Reports pages that were never written as holes.
    #[cold]
    fn block_status(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        let Some((part, range)) = self.pieces(range).next() else {
            return Ok(());
        };
        // SAFETY: the request is in flight.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let end = range.end.min(range.start + MAX_STATUS);
        for (is_written, piece) in part.pieces(range.start..end) {
            let status = match is_written {
                true => Status::DATA,
                false => Status::HOLE,
            };
            if !out.push(status, piece.end - piece.start) {
                break;
            }
        }
        Ok(())
    }

    #[inline]
    fn copy(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        let is_read = request.op == Op::Read;
        if range.end > self.first.range.end || range.is_empty() {
            return self.copy_pieces(request, range);
        }
        if is_read && !self.first.is_written(&range) {
            return self.copy_pieces(request, range);
        }
        let mut at = self.first.iovec(&range).iov_base.cast::<u8>();
        let mut left = request.len as usize;
        for segment in &request.segments {
            let (buffer, len) = (segment.iov_base.cast::<u8>(), segment.iov_len);
            left = left.checked_sub(len).ok_or(libc::EINVAL)?;
            // SAFETY: the source vouches for its segments; `at` with the rest
            // of the range behind it lies in the mapping, which no guest
            // memory overlaps.
            unsafe {
                match is_read {
                    true => std::ptr::copy_nonoverlapping(at, buffer, len),
                    false => std::ptr::copy_nonoverlapping(buffer, at, len),
                }
                at = at.add(len);
            }
        }
        if !is_read {
            self.first.wrote(&range);
        }
        Ok(())
    }

    /// Copies a range that crosses mappings, or that includes pages never written.
    #[cold]
    fn copy_pieces(&self, request: &Request, range: Range<u64>) -> Result<(), i32> {
        let there: usize = request.segments.iter().map(|s| s.iov_len).sum();
        if there as u64 != request.len {
            return Err(libc::EINVAL);
        }
        let start = range.start;
        for (part, range) in self.pieces(range) {
            // SAFETY: the source vouches for its segments, and the pieces are mapped.
            unsafe {
                match request.op {
                    Op::Read => read(part, range, request, start),
                    _ => {
                        copy(
                            part.iovec(&range),
                            &request.segments,
                            range.start - start,
                            Direction::FromSegments,
                        );
                        part.wrote(&range);
                    }
                }
            }
        }
        Ok(())
    }

    fn zero(&self, request: &Request) -> Result<(), i32> {
        let range = self.range(request)?;
        self.pieces(range)
            .try_for_each(|(part, range)| part.zero(range))
    }
}

/// Fills the segments of a request that begins at `start` with the data of a range.
///
/// # Safety
/// The segments are valid for writes.
unsafe fn read(part: &Part, range: Range<u64>, request: &Request, start: u64) {
    for (is_written, piece) in part.pieces(range) {
        let at = piece.start - start;
        // SAFETY: as required of the caller; the piece is mapped.
        unsafe {
            match is_written {
                true => copy(
                    part.iovec(&piece),
                    &request.segments,
                    at,
                    Direction::ToSegments,
                ),
                false => clear(&request.segments, at..at + (piece.end - piece.start)),
            }
        }
    }
}
