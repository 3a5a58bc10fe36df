//! A worker's channel to an encrypted storage.

use super::helped_pieces::{HelpedPieces, Work};
use super::piece::Piece;
use super::place::Place;
use crate::served::helpers::Helpers;
use crate::served::io::Buf;
use crate::served::memo::{EPOCH, UNCOUNTED};
use crate::served::pool::Pool;
use crate::served::split::SplitRequests;
use fathom_core::{
    Channel, ChannelLayer, Cx, Extents, Op, Owner, Request, RequestId, Stage, Status, Token,
};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Maximum number of pieces of one worker in flight; further ones are queued.
const PIECES: usize = 128;

/// Maximum bytes of a piece; a multiple of all sector sizes.
const MAX_PIECE: u64 = 256 << 10;

/// Bytes of all pieces in flight from which on no further piece begins.
const MAX_BYTES: u64 = 16 << 20;

pub(super) struct EncryptedChannel {
    below: Box<dyn Channel>,
    place: Place,
    owner: Owner,
    pool: Rc<Pool>,
    /// Indexed by the child's slot in the slab.
    pieces: Vec<Option<(Piece, Buf)>>,
    /// Pieces that helpers are working on.
    helped_pieces: HelpedPieces,
    /// Tag of the wake-ups by helpers.
    tag: u16,
    count: usize,
    bytes: u64,
    requests: SplitRequests,
}

impl EncryptedChannel {
    pub(super) fn new(
        below: Box<dyn Channel>,
        place: Place,
        helpers: &Arc<Helpers>,
        cx: &mut Cx,
    ) -> io::Result<EncryptedChannel> {
        let helped_pieces = HelpedPieces::new(helpers)?;
        let owner = cx.reserve_children(PIECES)?;
        let tag = cx.new_tag();
        cx.engine.watch(helped_pieces.fd(), Token::channel(tag))?;
        Ok(EncryptedChannel {
            below,
            helped_pieces,
            tag,
            place,
            owner,
            pool: Rc::default(),
            pieces: Vec::new(),
            count: 0,
            bytes: 0,
            requests: SplitRequests::default(),
        })
    }

    fn begin(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let range = request.at..request.at + request.len;
        if request.op != Op::Read && self.place.outer(&range) != range {
            return cx.complete(id, libc::EINVAL);
        }
        self.requests.add(cx, id);
    }

    /// Begins as many pieces as the limits allow.
    fn go_on(&mut self, cx: &mut Cx) {
        let sector = self.place.sector();
        let end = |from| (from & !(sector - 1)) + MAX_PIECE;
        while self.count < PIECES
            && self.bytes < MAX_BYTES
            && let Some((id, range)) = self.requests.next_piece(cx, end)
        {
            self.start(cx, id, range);
        }
    }

    fn start(&mut self, cx: &mut Cx, parent: RequestId, inner: Range<u64>) {
        let piece = Piece {
            parent,
            outer: self.place.outer(&inner),
            inner,
        };
        cx.enter(parent, Stage::Device);
        self.count += 1;
        self.bytes += piece.len();
        let mut buf = self.pool.take(piece.len() as usize);
        let request = &cx.slab[parent];
        if request.op == Op::Read {
            return self.submit_piece(cx, Op::Read, piece, buf);
        }
        piece.take(request, &mut buf);
        match self.helped_pieces.helps_with(&piece) {
            true => self
                .helped_pieces
                .send(&self.place, &self.pool, Work::Encrypt, piece, buf),
            false => {
                let at = piece.outer.start;
                self.place.sectors.encrypt(buf.bytes_mut(), at);
                self.submit_piece(cx, Op::Write, piece, buf);
            }
        }
    }

    fn submit_piece(&mut self, cx: &mut Cx, op: Op, piece: Piece, buf: Buf) {
        let child = cx.slab.take().expect("room was made for all pieces");
        let (at, len) = (self.place.start + piece.outer.start, piece.len());
        let parent = &cx.slab[piece.parent];
        let (fua, source, queue) = (parent.fua, parent.source, parent.queue);
        let (stamps, memo) = (parent.stamps, parent.memo);
        let request = &mut cx.slab[child];
        request.stamps = stamps;
        (request.op, request.fua, request.unmap) = (op, fua && op == Op::Write, false);
        (request.owner, request.source, request.queue) = (self.owner, source, queue);
        (request.offset, request.at, request.len) = (at, at, len);
        request.error = 0;
        // The memo tells the outer channel which storage completes the child. Only the request
        // itself is counted in an epoch.
        request.memo = memo;
        request.memo[EPOCH] = UNCOUNTED;
        request.segments.clear();
        request.segments.push(buf.iovec());
        let index = child.0 as usize;
        if self.pieces.len() <= index {
            self.pieces.resize_with(index + 1, || None);
        }
        self.pieces[index] = Some((piece, buf));
        self.below.submit(cx, child);
    }

    fn piece_done(&mut self, cx: &mut Cx, child: RequestId) {
        let piece = self.pieces[child.0 as usize].take();
        let (piece, mut buf) = piece.expect("pieces are in flight until they are done");
        let errno = cx.slab[child].error;
        cx.slab.put(child);
        if errno != 0 || cx.slab[piece.parent].op != Op::Read {
            return self.end(cx, &piece, errno);
        }
        if self.helped_pieces.helps_with(&piece) {
            return self
                .helped_pieces
                .send(&self.place, &self.pool, Work::Decrypt, piece, buf);
        }
        let at = piece.outer.start;
        self.place.sectors.decrypt(buf.bytes_mut(), at);
        piece.give(&cx.slab[piece.parent], &buf);
        self.end(cx, &piece, 0);
    }

    /// Continues with a piece that a helper has finished.
    fn helped(&mut self, cx: &mut Cx, piece: Piece, buf: Option<Buf>) {
        let Some(buf) = buf else {
            return self.end(cx, &piece, libc::EIO);
        };
        if cx.slab[piece.parent].op != Op::Read {
            return self.submit_piece(cx, Op::Write, piece, buf);
        }
        piece.give(&cx.slab[piece.parent], &buf);
        self.end(cx, &piece, 0);
    }

    fn end(&mut self, cx: &mut Cx, piece: &Piece, errno: i32) {
        self.count -= 1;
        self.bytes -= piece.len();
        let len = piece.inner.end - piece.inner.start;
        self.requests.piece_done(cx, piece.parent, len, errno);
    }

    /// Handles finished pieces and begins new ones, until there is no progress.
    #[inline]
    fn settle(&mut self, cx: &mut Cx) {
        loop {
            while let Some(child) = cx.child_done(self.owner) {
                self.piece_done(cx, child);
            }
            while let Some((piece, buf)) = self.helped_pieces.next() {
                self.helped(cx, piece, buf);
            }
            self.go_on(cx);
            if !cx.has_child_done(self.owner) && !self.helped_pieces.go_on() {
                return;
            }
        }
    }
}

/// Reports the whole range as data, since unwritten parts decrypt to random bytes.
fn answer(request: &Request) {
    // SAFETY: the request is in flight until it is completed, after this.
    let mut out = unsafe { Extents::of(&request.segments, request.len) };
    out.push(Status::DATA, request.len);
}

impl ChannelLayer for EncryptedChannel {
    #[inline]
    fn below(&mut self) -> &mut dyn Channel {
        &mut *self.below
    }

    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        match cx.slab[id].op {
            Op::Read | Op::Write | Op::WriteZeroes => self.begin(cx, id),
            Op::Flush => self.below.submit(cx, id),
            // As with QEMU: a discard would show in the file which parts are in use, and the
            // discarded part would read as random bytes.
            Op::Discard => cx.complete(id, 0),
            Op::BlockStatus => {
                answer(&cx.slab[id]);
                cx.complete(id, 0);
            }
        }
        self.settle(cx);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        if id != RequestId::NOBODY || tag != self.tag {
            self.below.complete(cx, id, tag, result);
        }
        self.settle(cx);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.below.timer(cx);
        self.settle(cx);
    }

    /// Drains the storage. Requests that are queued here wait only for I/O in flight.
    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.below.drain(cx, source);
        self.settle(cx);
    }
}

impl Drop for EncryptedChannel {
    fn drop(&mut self) {
        if self.count > 0 {
            // The kernel may still be using the buffers.
            std::mem::forget(std::mem::take(&mut self.pieces));
        }
    }
}
