//! Guest data between a request and a piece's buffer.

use crate::served::io::Buf;
use crate::served::segments::{fill, gather, part};
use fathom_core::{Op, Request, RequestId};
use std::ops::Range;

/// A part of a request, whole sectors with what it needs of their first and last one.
pub(super) struct Piece {
    pub(super) parent: RequestId,
    /// What the request wants of it, from the storage's start on.
    pub(super) inner: Range<u64>,
    /// The sectors.
    pub(super) outer: Range<u64>,
}

impl Piece {
    /// Bytes of its buffer.
    pub(super) fn len(&self) -> u64 {
        self.outer.end - self.outer.start
    }

    /// Puts what the request writes into the buffer.
    pub(super) fn take(&self, request: &Request, buf: &mut Buf) {
        match request.op {
            Op::WriteZeroes => buf.bytes_mut().fill(0),
            _ => {
                let segments = part(&request.segments, self.within(request));
                // SAFETY: the request is in flight, so that its segments are valid; they are as long
                // as the piece, which is whole sectors.
                unsafe { gather(&segments, buf.bytes_mut()) };
            }
        }
    }

    /// Hands what was read to the request.
    pub(super) fn give(&self, request: &Request, buf: &Buf) {
        let segments = part(&request.segments, self.within(request));
        let skip = (self.inner.start - self.outer.start) as usize;
        let len = (self.inner.end - self.inner.start) as usize;
        // SAFETY: the request is in flight, so that its segments are valid, and these are as long.
        unsafe { fill(&segments, &buf.bytes()[skip..skip + len]) };
    }

    /// Of the request's data.
    fn within(&self, request: &Request) -> Range<u64> {
        self.inner.start - request.at..self.inner.end - request.at
    }
}
