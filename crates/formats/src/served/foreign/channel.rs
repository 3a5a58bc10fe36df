//! A worker's channel to an image in another program's format, which helper threads read.

use super::bytes::ForeignBytes;
use crate::served::helpers::Helpers;
use crate::served::io::Buf;
use crate::served::pool::Pool;
use crate::served::split::SplitRequests;
use crate::served::task::Executor;
use fathom_core::segments::write_at;
use fathom_core::{Channel, Cx, Extents, Op, Request, RequestId, Stage, Status, Token};
use fathom_files::ImageFile;
use fathom_foreign::Place;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Maximum number of pieces that one worker reads at once; further ones are queued.
const PIECES: usize = 32;

/// Maximum bytes of a piece: mostly whole grains and blocks.
const MAX_PIECE: u64 = 256 << 10;

/// A piece that was read, or the error.
struct Back {
    id: RequestId,
    range: Range<u64>,
    read: io::Result<Buf>,
}

pub(super) struct ForeignChannel {
    bytes: ForeignBytes,
    helpers: Arc<Helpers>,
    executor: Executor,
    pool: Rc<Pool>,
    back: Rc<RefCell<Vec<Back>>>,
    count: usize,
    requests: SplitRequests,
}

impl ForeignChannel {
    pub(super) fn new(
        bytes: &ForeignBytes,
        helpers: &Arc<Helpers>,
        cx: &mut Cx,
    ) -> io::Result<ForeignChannel> {
        let executor = Executor::new()?;
        let token = Token::channel(cx.new_tag());
        cx.engine.watch(executor.fd(), token)?;
        Ok(ForeignChannel {
            bytes: bytes.clone(),
            helpers: helpers.clone(),
            executor,
            pool: Rc::default(),
            back: Rc::default(),
            count: 0,
            requests: SplitRequests::default(),
        })
    }

    fn begin(&mut self, cx: &mut Cx, id: RequestId) {
        self.requests.add(cx, id);
        cx.enter(id, Stage::Device);
    }

    /// Begins as many pieces as the limit allows.
    fn go_on(&mut self, cx: &mut Cx) {
        let end = |from| (from / MAX_PIECE + 1) * MAX_PIECE;
        while self.count < PIECES
            && let Some((id, range)) = self.requests.next_piece(cx, end)
        {
            self.read(id, range);
        }
    }

    fn read(&mut self, id: RequestId, range: Range<u64>) {
        self.count += 1;
        let buf = self.pool.take((range.end - range.start) as usize);
        let (bytes, at) = (self.bytes.clone(), range.start);
        let shared = Arc::new(Mutex::new(Some(buf.loosen())));
        let work = move || {
            let mut loose = shared.lock();
            let mut loose = loose.take().ok_or(io::ErrorKind::Other)?;
            bytes.read_at(loose.bytes_mut(), at)?;
            Ok(loose)
        };
        let (helpers, pool, back) = (self.helpers.clone(), self.pool.clone(), self.back.clone());
        self.executor.spawn(async move {
            let read = helpers.run(work.clone()).await;
            // If no helper thread is available, this worker reads.
            let read = read.unwrap_or_else(work);
            let read = read.map(|loose| loose.back(&pool));
            back.borrow_mut().push(Back { id, range, read });
        });
    }

    fn take(&mut self, cx: &mut Cx, back: Back) {
        self.count -= 1;
        let Back { id, range, read } = back;
        let errno = match read {
            Ok(buf) => {
                give(&cx.slab[id], &range, &buf);
                0
            }
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        };
        self.requests
            .piece_done(cx, id, range.end - range.start, errno);
    }

    /// Handles finished pieces and begins new ones, until there is no progress.
    fn settle(&mut self, cx: &mut Cx) {
        loop {
            self.go_on(cx);
            if !self.executor.is_idle() {
                self.executor.run();
            }
            let back = std::mem::take(&mut *self.back.borrow_mut());
            if back.is_empty() {
                return;
            }
            back.into_iter().for_each(|back| self.take(cx, back));
        }
    }

    /// Answers a block status request from the image's tables.
    fn answer(&self, request: &Request) {
        let image = self.bytes.0.image();
        // SAFETY: the request is in flight until it is completed, after this.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let (mut at, end) = (request.at, request.at + request.len);
        while at < end {
            let extent = image.lookup(at, end - at);
            let len = if extent.len == 0 {
                end - at
            } else {
                extent.len
            };
            let status = match extent.place {
                Place::Zero => Status::HOLE,
                Place::Data { .. } | Place::Compressed(_) => Status::DATA,
            };
            if !out.push(status, len) {
                return;
            }
            at += len;
        }
    }
}

/// Copies a piece that was read into the request's buffers.
fn give(request: &Request, range: &Range<u64>, buf: &Buf) {
    // SAFETY: the request is in flight, so its segments are valid.
    unsafe { write_at(&request.segments, range.start - request.at, buf.bytes()) };
}

impl Channel for ForeignChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        match cx.slab[id].op {
            Op::Read => self.begin(cx, id),
            Op::Flush => cx.complete(id, 0),
            Op::BlockStatus => {
                self.answer(&cx.slab[id]);
                cx.complete(id, 0);
            }
            Op::Write | Op::WriteZeroes | Op::Discard => cx.complete(id, libc::EROFS),
        }
        self.settle(cx);
    }

    fn complete(&mut self, cx: &mut Cx, _id: RequestId, _tag: u16, _result: i32) {
        self.settle(cx);
    }
}
