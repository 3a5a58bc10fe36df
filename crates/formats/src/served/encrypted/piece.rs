//! Copies guest data between a request and a piece's buffer.

use crate::served::io::Buf;
use fathom_core::segments::{read_at, write_at};
use fathom_core::{Op, Request, RequestId};
use std::ops::Range;

/// A part of a request, extended to whole sectors.
pub(super) struct Piece {
    pub(super) parent: RequestId,
    /// The bytes that the request covers, as offsets from the storage's start.
    pub(super) inner: Range<u64>,
    /// The sectors that these bytes touch.
    pub(super) outer: Range<u64>,
}

impl Piece {
    /// Returns the bytes of the piece's buffer.
    pub(super) fn len(&self) -> u64 {
        self.outer.end - self.outer.start
    }

    /// Copies the request's data into the buffer.
    pub(super) fn take(&self, request: &Request, buf: &mut Buf) {
        match request.op {
            Op::WriteZeroes => buf.bytes_mut().fill(0),
            _ => {
                let at = self.inner.start - request.at;
                // SAFETY: the request is in flight, so its segments are valid.
                unsafe { read_at(&request.segments, at, buf.bytes_mut()) };
            }
        }
    }

    /// Copies the data that was read into the request's buffers.
    pub(super) fn give(&self, request: &Request, buf: &Buf) {
        let at = self.inner.start - request.at;
        let skip = (self.inner.start - self.outer.start) as usize;
        let len = (self.inner.end - self.inner.start) as usize;
        // SAFETY: the request is in flight, so its segments are valid.
        unsafe { write_at(&request.segments, at, &buf.bytes()[skip..skip + len]) };
    }
}
