//! Unaligned requests: read-modify-write of partial blocks.

use super::ByteChannel;
use crate::buffers::Buffer;
use fathom_core::{Cx, Op, RequestId, extents};
use std::ops::Range;

/// Progress of an unaligned request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Reads the blocks that the request changes partly.
    Reading,
    /// Writes these blocks back with zeroes in the parts that the request covers.
    Writing,
    /// Submits the request itself, on whole blocks.
    Whole,
}

pub(super) struct Part {
    id: RequestId,
    /// The request's original range in bytes.
    pub(super) range: Range<u64>,
    /// Holds the first block, then the last one if that is another.
    buffer: Buffer,
    step: Step,
    /// Number of edge blocks that are being read or written.
    pending: usize,
    /// Error number of an edge block's read or write; 0 if none.
    errno: i32,
    /// Whether a segment with old bytes was added before, and behind, the request's data.
    surrounded: (bool, bool),
}

impl Part {
    pub(super) fn new(id: RequestId, range: Range<u64>, buffer: Buffer) -> Part {
        Part {
            id,
            range,
            buffer,
            step: Step::Whole,
            pending: 0,
            errno: 0,
            surrounded: (false, false),
        }
    }
}

impl ByteChannel {
    fn part(&mut self, n: usize) -> &mut Part {
        self.parts[n].as_mut().expect("it has not ended")
    }

    /// Returns the blocks that the range covers partly, and their offsets in the buffer: 0 for the
    /// first block, one block for the last.
    fn edges(&self, range: &Range<u64>) -> [Option<(u64, usize)>; 2] {
        let (outer, block) = (self.outer(range), self.block);
        let last = outer.end - block;
        let first = outer.start < range.start || last == outer.start;
        let behind = range.end < outer.end && last > outer.start;
        [
            first.then_some((outer.start, 0)),
            behind.then_some((last, block as usize)),
        ]
    }

    /// Reads the blocks that the request changes partly.
    pub(super) fn read_edges(&mut self, cx: &mut Cx, n: usize) {
        self.move_edges(cx, n, Op::Read, Step::Reading);
    }

    fn move_edges(&mut self, cx: &mut Cx, n: usize, op: Op, step: Step) {
        let edges = self.edges(&self.parts[n].as_ref().expect("active").range);
        let part = self.part(n);
        (part.step, part.pending) = (step, edges.iter().flatten().count());
        let id = part.id;
        for (at, start) in edges.into_iter().flatten() {
            let child = cx.slab.take().expect("reserved by `new`");
            let (source, queue, fua) = (cx.slab[id].source, cx.slab[id].queue, cx.slab[id].fua);
            let part = self.parts[n].as_ref().expect("active");
            let segment = self.buffers.part(&part.buffer, start, self.block as usize);
            let request = &mut cx.slab[child];
            request.stamps = Default::default();
            request.op = op;
            (request.unmap, request.error) = (false, 0);
            (request.owner, request.source, request.queue) = (self.owner, source, queue);
            (request.offset, request.at, request.len) = (at, at, self.block);
            request.fua = fua && op == Op::Write;
            request.cookie = n as u64;
            request.segments.clear();
            request.segments.push(segment);
            self.below.submit(cx, child);
        }
    }

    /// Handles the completion of an edge block's read or write.
    pub(super) fn edge_done(&mut self, cx: &mut Cx, child: RequestId) {
        let (n, error) = (cx.slab[child].cookie as usize, cx.slab[child].error);
        cx.slab.put(child);
        let part = self.part(n);
        part.errno = if error == 0 { part.errno } else { error };
        part.pending -= 1;
        if part.pending > 0 {
            return;
        }
        let (id, step, range) = (part.id, part.step, part.range.clone());
        if part.errno != 0 {
            let errno = part.errno;
            part.step = Step::Whole;
            return cx.complete(id, errno);
        }
        if cx.slab[id].op == Op::Write {
            self.surround(cx, n);
            let outer = self.outer(&range);
            self.submit_rest(cx, n, outer);
        } else if step == Step::Reading {
            self.zero_edges(n);
            self.move_edges(cx, n, Op::Write, Step::Writing);
        } else {
            let inner = self.inner(&range);
            self.submit_rest(cx, n, inner);
        }
    }

    /// Zeroes the bytes that the request covers in the blocks in the buffer.
    fn zero_edges(&mut self, n: usize) {
        let range = self.part(n).range.clone();
        for (at, start) in self.edges(&range).into_iter().flatten() {
            let from = range.start.max(at) - at;
            let to = range.end.min(at + self.block) - at;
            let (from, len) = (start + from as usize, (to - from) as usize);
            let part = self.parts[n].as_ref().expect("active");
            let piece = self.buffers.part(&part.buffer, from, len);
            // SAFETY: this part of the buffer belongs to the request, and no I/O on it is in
            // flight.
            unsafe { piece.iov_base.cast::<u8>().write_bytes(0, len) };
        }
    }

    /// Puts the remaining bytes of the first and of the last block around the request's data.
    pub(super) fn surround(&mut self, cx: &mut Cx, n: usize) {
        let range = self.part(n).range.clone();
        let outer = self.outer(&range);
        let before = (range.start - outer.start) as usize;
        let behind = (outer.end - range.end) as usize;
        let blocks = ((outer.end - outer.start) / self.block).min(2) as usize;
        let end = blocks * self.block as usize;
        let part = self.parts[n].as_mut().expect("active");
        part.surrounded = (before > 0, behind > 0);
        let segments = &mut cx.slab[part.id].segments;
        if before > 0 {
            segments.insert(0, self.buffers.part(&part.buffer, 0, before));
        }
        if behind > 0 {
            segments.push(self.buffers.part(&part.buffer, end - behind, behind));
        }
    }

    /// Submits the request on whole blocks, or completes it if `blocks` is empty.
    pub(super) fn submit_rest(&mut self, cx: &mut Cx, n: usize, blocks: Range<u64>) {
        let part = self.part(n);
        part.step = Step::Whole;
        let id = part.id;
        if blocks.is_empty() {
            return cx.complete(id, 0);
        }
        let request = &mut cx.slab[id];
        (request.offset, request.at) = (blocks.start, blocks.start);
        request.len = blocks.end - blocks.start;
        self.below.submit(cx, id);
    }

    /// Restores a completed request to its original range and segments, if it is unaligned.
    #[cold]
    pub(super) fn end(&mut self, cx: &mut Cx, id: RequestId) {
        let is_it = |part: &Option<Part>| part.as_ref().is_some_and(|part| part.id == id);
        let Some(n) = self.parts.iter().position(is_it) else {
            return;
        };
        let Some(part) = self.parts[n].take() else {
            return;
        };
        self.active -= 1;
        let request = &mut cx.slab[id];
        if part.surrounded.0 {
            request.segments.remove(0);
        }
        if part.surrounded.1 {
            request.segments.pop();
        }
        let len = part.range.end - part.range.start;
        if request.op == Op::BlockStatus && request.error == 0 {
            let skipped = part.range.start - request.offset;
            // SAFETY: the request has not been answered yet.
            unsafe { extents::narrow(&request.segments, skipped, len) };
        }
        (request.offset, request.at, request.len) = (part.range.start, part.range.start, len);
        self.buffers.put(part.buffer);
        if let Some(next) = self.starved.pop_front() {
            self.start(cx, next);
        }
    }
}
