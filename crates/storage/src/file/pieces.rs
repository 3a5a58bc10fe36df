//! Requests that take several steps. Data that direct I/O does not accept goes through a buffer,
//! partial blocks need read-modify-write, and zeroes are written where the storage cannot make
//! them.

use super::channel::{FileChannel, Step};
use super::plan::Action;
use super::transfer::{Progress, Transfer};
use fathom_core::segments::{Direction, clear, copy, zeroes};
use fathom_core::{Cx, Op, RequestId, Segments, Stage};
use libc::iovec;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl FileChannel {
    pub(super) fn start_pieces(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        self.state(id).at = 0;
        self.next_piece(cx, id);
    }

    fn next_piece(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let (op, unmap, base) = (request.op, request.unmap, request.at);
        let end = base + request.len;
        loop {
            let start = base + self.state(id).at;
            if start == end {
                return self.last_step(cx, id);
            }
            let piece = self.shared.planner.plan(op, unmap, start..end);
            let state = self.state(id);
            state.piece_end = piece.end - base;
            match piece.action {
                Action::Skip => state.at = state.piece_end,
                Action::Buffer => return self.start_buffered(cx, id),
                Action::WriteZeroes => {
                    state.transfer = Transfer::new(start, piece.end - start);
                    return self.push_piece(cx, id, Step::ZeroWrite);
                }
                Action::Allocate(method) => {
                    state.method = method;
                    let range = start..piece.end;
                    return self.push_without_data(cx, id, Step::Allocate, method.io_kind(), range);
                }
            }
        }
    }

    fn last_step(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let without_data = matches!(request.op, Op::Discard | Op::WriteZeroes);
        if without_data && (request.fua || self.dsync) {
            self.push_sync(cx, id, Step::FinalSync);
        } else {
            self.end_pieces(cx, id, None);
        }
    }

    /// Returns the buffer, finishes or fails the request, and starts the next request that waits
    /// for a buffer.
    fn end_pieces(&mut self, cx: &mut Cx, id: RequestId, errno: Option<i32>) {
        if let Some(buffer) = self.state(id).buffer.take() {
            self.buffers.put(buffer);
        }
        match errno {
            None => self.finish(cx, id, 0),
            Some(errno) => self.fail(cx, id, errno),
        }
        if let Some(next) = self.starved.pop_front() {
            self.start_buffered(cx, next);
        }
    }

    /// Returns the range of the piece in progress, in bytes from the start of the file.
    fn piece(&mut self, cx: &Cx, id: RequestId) -> Range<u64> {
        let base = cx.slab[id].at;
        let state = self.state(id);
        base + state.at..base + state.piece_end
    }

    /// Returns the whole blocks that a range touches.
    fn outer(&self, range: &Range<u64>) -> Range<u64> {
        let block = self.shared.planner.block;
        range.start & !(block - 1)..range.end.next_multiple_of(block)
    }

    fn start_buffered(&mut self, cx: &mut Cx, id: RequestId) {
        if self.state(id).buffer.is_none() {
            let Some(buffer) = self.buffers.take() else {
                return self.starved.push_back(id);
            };
            self.state(id).buffer = Some(buffer);
        }
        let piece = self.piece(cx, id);
        let outer = self.outer(&piece);
        if cx.slab[id].op == Op::Read {
            let mut transfer = Transfer::new(outer.start, outer.end - outer.start);
            transfer.needed = piece.end - outer.start;
            self.state(id).transfer = transfer;
            self.push_piece(cx, id, Step::BufferedRead);
        } else if piece.start != outer.start {
            self.read_block(cx, id, outer.start, Step::FirstBlock);
        } else {
            self.read_last_block(cx, id);
        }
    }

    /// Reads a block of which only a part will be written.
    fn read_block(&mut self, cx: &mut Cx, id: RequestId, start: u64, step: Step) {
        let block = self.shared.planner.block;
        let mut transfer = Transfer::new(start, block);
        // The file may end within this block.
        transfer.needed = block.min(self.shared.limit().saturating_sub(start));
        self.state(id).transfer = transfer;
        let whole = self.operand(cx, id, step, 0..block);
        // SAFETY: this part of the buffer belongs to the request.
        unsafe {
            whole[0]
                .iov_base
                .cast::<u8>()
                .write_bytes(0, whole[0].iov_len)
        };
        self.push_piece(cx, id, step);
    }

    /// Reads the last block, unless the piece covers it completely or it was read as the first
    /// block.
    fn read_last_block(&mut self, cx: &mut Cx, id: RequestId) {
        let piece = self.piece(cx, id);
        let outer = self.outer(&piece);
        let last = outer.end - self.shared.planner.block;
        let was_first = last == outer.start && piece.start != outer.start;
        if piece.end == outer.end || was_first {
            self.write_buffer(cx, id);
        } else {
            self.read_block(cx, id, last, Step::LastBlock);
        }
    }

    /// Copies the request's data over the blocks that were read, and writes the blocks.
    fn write_buffer(&mut self, cx: &mut Cx, id: RequestId) {
        let piece = self.piece(cx, id);
        let outer = self.outer(&piece);
        let at = self.state(id).at;
        let inner = self.part_of_buffer(id, piece.start - outer.start, piece.end - piece.start);
        let request = &cx.slab[id];
        // SAFETY: this part of the buffer belongs to the request, and the source vouches for its
        // segments.
        unsafe {
            match request.op {
                Op::Write => copy(inner, &request.segments, at, Direction::FromSegments),
                _ => inner.iov_base.cast::<u8>().write_bytes(0, inner.iov_len),
            }
        }
        if outer.end > self.shared.limit() {
            self.shared.padded.store(true, Ordering::Relaxed);
        }
        self.state(id).transfer = Transfer::new(outer.start, outer.end - outer.start);
        self.push_piece(cx, id, Step::BufferedWrite);
    }

    fn part_of_buffer(&self, id: RequestId, start: u64, len: u64) -> iovec {
        let buffer = self.states[id.0 as usize].buffer.as_ref();
        let buffer = buffer.expect("taken when the piece was started");
        self.buffers.part(buffer, start as usize, len as usize)
    }

    /// Returns the memory for the bytes `part` of the transfer in progress.
    fn operand(&mut self, cx: &Cx, id: RequestId, step: Step, part: Range<u64>) -> Segments {
        let len = part.end - part.start;
        if step == Step::ZeroWrite {
            return zeroes(len).collect();
        }
        let piece = self.piece(cx, id);
        let outer = self.outer(&piece);
        let start = self.state(id).transfer.offset - outer.start + part.start;
        Segments::from_slice(&[self.part_of_buffer(id, start, len)])
    }

    fn push_piece(&mut self, cx: &mut Cx, id: RequestId, step: Step) {
        let transfer = self.state(id).transfer;
        let iov = self.operand(cx, id, step, transfer.done..transfer.len);
        self.state(id).iov = iov;
        self.push_transfer(cx, id, step);
    }

    pub(super) fn piece_came_back(&mut self, cx: &mut Cx, id: RequestId, step: Step, result: i32) {
        if step == Step::Allocate {
            return self.allocated(cx, id, result);
        }
        let block = self.shared.planner.block;
        let mut progress = self.state(id).transfer.advance(result, block);
        if progress == Progress::Ended {
            progress = self.piece_ended(cx, id, step);
        }
        match progress {
            Progress::More => self.push_piece(cx, id, step),
            Progress::Ended => self.end_pieces(cx, id, Some(libc::EIO)),
            Progress::Failed(errno) => self.end_pieces(cx, id, Some(errno)),
            Progress::Complete => match step {
                Step::FirstBlock => self.read_last_block(cx, id),
                Step::LastBlock => self.write_buffer(cx, id),
                Step::BufferedRead => self.deliver(cx, id),
                _ => self.piece_is_done(cx, id),
            },
        }
    }

    /// Handles a file that ends within the piece. If `Shared::may_miss` allows it, the rest of a
    /// read is zeroes.
    fn piece_ended(&mut self, cx: &Cx, id: RequestId, step: Step) -> Progress {
        let reads = matches!(
            step,
            Step::BufferedRead | Step::FirstBlock | Step::LastBlock
        );
        let transfer = self.state(id).transfer;
        let end = transfer.offset + transfer.len;
        let missing = transfer.offset + transfer.done..end;
        if !reads || !self.shared.may_miss(missing) {
            return Progress::Ended;
        }
        let rest = self.operand(cx, id, step, transfer.done..transfer.len);
        // SAFETY: this part of the buffer belongs to the request.
        unsafe { clear(&rest, 0..u64::MAX) };
        Progress::Complete
    }

    /// Copies the bytes that were read to the guest.
    fn deliver(&mut self, cx: &mut Cx, id: RequestId) {
        let piece = self.piece(cx, id);
        let outer = self.outer(&piece);
        let at = self.state(id).at;
        let inner = self.part_of_buffer(id, piece.start - outer.start, piece.end - piece.start);
        // SAFETY: the buffer belongs to the request, and the source vouches for its segments.
        unsafe { copy(inner, &cx.slab[id].segments, at, Direction::ToSegments) };
        self.piece_is_done(cx, id);
    }

    fn piece_is_done(&mut self, cx: &mut Cx, id: RequestId) {
        let state = self.state(id);
        state.at = state.piece_end;
        self.next_piece(cx, id);
    }

    fn allocated(&mut self, cx: &mut Cx, id: RequestId, result: i32) {
        match -result {
            0 => self.piece_is_done(cx, id),
            libc::EINTR => self.next_piece(cx, id),
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::ENODEV => {
                let method = self.state(id).method;
                self.shared.planner.unsupported.add(method);
                self.next_piece(cx, id);
            }
            errno => self.end_pieces(cx, id, Some(errno)),
        }
    }
}
