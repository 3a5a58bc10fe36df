//! Parts of requests' buffers.

use super::io::{Buf, Payload};
use fathom_core::Segments;
use libc::iovec;
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

const ZEROES_LEN: usize = 64 << 10;

/// The source of zeroes that are written.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES_LEN]);
static ZEROES: Zeroes = Zeroes([0; ZEROES_LEN]);

/// Returns the bytes `range` of a request's buffers.
pub(super) fn part(segments: &[iovec], range: Range<u64>) -> Segments {
    let mut out = Segments::new();
    append_part(&mut out, segments, range);
    out
}

/// Appends the bytes `range` of `segments`.
pub(super) fn append_part(out: &mut Segments, segments: &[iovec], range: Range<u64>) {
    let mut start = 0;
    for segment in segments {
        let end = start + segment.iov_len as u64;
        let (from, to) = (range.start.max(start), range.end.min(end));
        if from < to {
            out.push(iovec {
                iov_base: segment.iov_base.wrapping_byte_add((from - start) as usize),
                iov_len: (to - from) as usize,
            });
        }
        start = end;
    }
}

/// Appends `len` zeroes to be written.
pub(super) fn append_zeroes(out: &mut Segments, len: u64) {
    let base = ZEROES.0.as_ptr().cast_mut().cast();
    let mut left = len as usize;
    while left > 0 {
        let iov_len = left.min(ZEROES_LEN);
        out.push(iovec {
            iov_base: base,
            iov_len,
        });
        left -= iov_len;
    }
}

/// Fills the segments with zeroes.
///
/// # Safety
/// The segments are valid, as those of a request in flight are.
pub(super) unsafe fn clear(segments: &[iovec]) {
    for segment in segments {
        // SAFETY: as required of the caller.
        unsafe {
            segment
                .iov_base
                .cast::<u8>()
                .write_bytes(0, segment.iov_len)
        };
    }
}

/// Copies `bytes` into the segments.
///
/// # Safety
/// The segments are valid, and have room for all bytes.
pub(super) unsafe fn fill(segments: &[iovec], mut bytes: &[u8]) {
    for segment in segments {
        let n = segment.iov_len.min(bytes.len());
        // SAFETY: as required of the caller.
        unsafe {
            let base = segment.iov_base.cast::<u8>();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), base, n);
        }
        bytes = &bytes[n..];
    }
}

/// Copies the segments' bytes to the start of `bytes`.
///
/// # Safety
/// The segments are valid, and together not longer than `bytes`.
pub(super) unsafe fn gather(segments: &[iovec], mut bytes: &mut [u8]) {
    for segment in segments {
        let (to, rest) = bytes.split_at_mut(segment.iov_len);
        // SAFETY: as required of the caller.
        unsafe {
            let base = segment.iov_base.cast::<u8>();
            std::ptr::copy_nonoverlapping(base, to.as_mut_ptr(), to.len());
        }
        bytes = rest;
    }
}

/// The source of a write's bytes.
#[derive(Clone)]
pub(super) enum Source {
    Guest(Segments),
    Own(Rc<Buf>),
    Zeroes,
}

impl Source {
    /// Appends the bytes `range` of this source to a payload.
    pub(super) fn append(&self, to: &mut Payload, range: Range<u64>) {
        match self {
            Source::Guest(segments) => append_part(&mut to.segments, segments, range),
            Source::Own(buf) => {
                append_part(&mut to.segments, &[buf.iovec()], range);
                to.keep.push(buf.clone());
            }
            Source::Zeroes => append_zeroes(&mut to.segments, range.end - range.start),
        }
    }

    pub(super) fn part(&self, range: Range<u64>) -> Payload {
        let mut payload = Payload {
            segments: Segments::new(),
            keep: SmallVec::new(),
        };
        self.append(&mut payload, range);
        payload
    }
}
