//! A worker's access to a file: dispatches each request to immediate service, to the engine
//! directly, or to several steps.

use super::flushes::{Flusher, Verdict};
use super::plan::Method;
use super::report::report;
use super::transfer::{Progress, Transfer};
use super::{Cache, Kind, LOOK_AT_FLUSHES, Shared};
use crate::buffers::{Buffer, Buffers};
use crate::ranges::Turns;
use fathom_core::segments::{clear, pieces};
use fathom_core::{
    Channel, Cx, Engine, FileId, Io, IoKind, Op, Request, RequestId, Segments, Stage, Token,
};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Purpose of an operation: the tag of its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Step {
    /// The whole request, with its own iovecs.
    Whole,
    /// The rest of a whole request after a short result.
    Rest,
    Flush,
    /// A piece of a read, into a buffer.
    BufferedRead,
    /// The first and the last block of a piece to be written, which change only partly.
    FirstBlock,
    LastBlock,
    /// A piece of a write, from a buffer.
    BufferedWrite,
    /// A piece of zeroes that is written.
    ZeroWrite,
    /// A discard or write zeroes by fallocate(2).
    Allocate,
    /// The flush that makes a discard or write zeroes durable.
    FinalSync,
    /// Wakes the channel because range locks may have been granted.
    Granted,
}

impl Step {
    const ALL: [Step; 11] = [
        Step::Whole,
        Step::Rest,
        Step::Flush,
        Step::BufferedRead,
        Step::FirstBlock,
        Step::LastBlock,
        Step::BufferedWrite,
        Step::ZeroWrite,
        Step::Allocate,
        Step::FinalSync,
        Step::Granted,
    ];

    fn of(tag: u16) -> Step {
        Step::ALL[usize::from(tag)]
    }
}

/// State of a request that takes several steps.
#[derive(Default)]
pub(super) struct State {
    /// Number of bytes of the request that are done.
    pub(super) at: u64,
    /// End of the piece in progress, in bytes from the start of the request.
    pub(super) piece_end: u64,
    pub(super) transfer: Transfer,
    /// Memory of the operation in flight, or of its rest.
    pub(super) iov: Segments,
    pub(super) buffer: Option<Buffer>,
    /// Method by which the storage is discarding or zeroing.
    pub(super) method: Method,
    /// Number of the request's flush.
    flush: u64,
}

/// Result of a flush for its requests.
#[derive(Clone, Copy)]
enum Ended {
    Durable,
    Failed(i32),
    /// The requests wait until the results of all flushes before this number have been seen.
    After(u64),
}

impl Ended {
    fn of(errno: i32) -> Ended {
        match errno {
            0 => Ended::Durable,
            errno => Ended::Failed(errno),
        }
    }
}

/// Requests that share flushes. The channel has one shared flush in flight at a time.
#[derive(Default)]
struct Groups {
    /// Requests of the flush in flight.
    in_flight: Vec<RequestId>,
    /// Requests of the next flush.
    waiting: Vec<RequestId>,
}

impl Groups {
    /// Adds a request. Returns true if its flush must begin now.
    fn join(&mut self, id: RequestId) -> bool {
        let begins = self.in_flight.is_empty();
        match begins {
            true => self.in_flight.push(id),
            false => self.waiting.push(id),
        }
        begins
    }

    /// Makes the waiting requests those of the flush in flight. Returns the first of them.
    fn begin_next(&mut self) -> Option<RequestId> {
        std::mem::swap(&mut self.in_flight, &mut self.waiting);
        self.in_flight.first().copied()
    }
}

pub(super) struct FileChannel {
    pub(super) shared: Arc<Shared>,
    file: FileId,
    /// The file through which the channel flushes.
    flushed_by: FileId,
    /// Bits that must be clear in offsets and lengths (`block_mask`) and in addresses
    /// (`address_mask`) for a request to go directly to the engine.
    block_mask: u64,
    address_mask: usize,
    /// Whether every write must be durable when it completes.
    pub(super) dsync: bool,
    /// Whether to try the page cache before handing a read to the engine. io_uring does so by
    /// itself, at less cost (0.67 us for 4 KiB, against 0.75 here and 3 in a thread).
    try_cache: bool,
    /// States by request.
    #[expect(clippy::vec_box, reason = "operations in flight point into the states")]
    pub(super) states: Vec<Box<State>>,
    pub(super) buffers: Buffers,
    /// Requests that wait for a buffer.
    pub(super) starved: VecDeque<RequestId>,
    /// Range locks, present if writes may change blocks partly.
    turns: Option<Turns>,
    flusher: Flusher,
    groups: Groups,
    /// Requests whose flush has succeeded, with the number before which the results of all flushes
    /// must be seen.
    flushed: Vec<(RequestId, u64)>,
}

impl FileChannel {
    pub(super) fn new(shared: Arc<Shared>, engine: &mut dyn Engine) -> io::Result<FileChannel> {
        let file = engine.add_file(shared.file.as_fd())?;
        let mut own = shared.own_files.iter();
        let own = own.find_map(|own| Some((own, own.flushes.only_flusher()?)));
        let (flushed_by, flusher) = match own {
            Some((own, flusher)) => (engine.add_file(own.file.as_fd())?, flusher),
            None => (file, shared.flushes.flusher()),
        };
        let turns = if shared.planner.block > 512 {
            let turns = shared.ranges.turns()?;
            engine.watch(turns.event(), Token::channel(Step::Granted as u16))?;
            Some(turns)
        } else {
            None
        };
        Ok(FileChannel {
            file,
            block_mask: shared.planner.block - 1,
            address_mask: shared.address_align as usize - 1,
            dsync: shared.options.cache == Cache::Writethrough,
            try_cache: shared.options.cache != Cache::None && engine.name() != "io_uring",
            states: Vec::new(),
            buffers: Buffers::new()?,
            starved: VecDeque::new(),
            turns,
            flusher,
            flushed_by,
            groups: Groups::default(),
            flushed: Vec::new(),
            shared,
        })
    }

    /// Returns the errno with which to refuse the request, or None if it can be served.
    #[inline]
    fn refusal(&self, request: &Request) -> Option<i32> {
        let size = self.shared.limit();
        let fits = request.at <= size && request.len <= size - request.at;
        match request.op {
            Op::Flush => None,
            _ if !fits => Some(libc::EIO),
            Op::Read | Op::BlockStatus => None,
            _ if self.shared.options.read_only => Some(libc::EROFS),
            Op::Discard if !self.shared.options.discard => Some(libc::EOPNOTSUPP),
            _ => None,
        }
    }

    /// Returns whether direct I/O accepts the request's buffers as they are.
    #[inline]
    fn is_aligned(&self, request: &Request) -> bool {
        let mask = self.block_mask;
        mask == 0
            || (request.at | request.len) & mask == 0
                && request.segments.iter().all(|s| {
                    s.iov_base.addr() & self.address_mask == 0 && s.iov_len as u64 & mask == 0
                })
    }

    #[inline]
    fn kind(&self, request: &Request) -> IoKind {
        match request.op {
            Op::Read => IoKind::Read,
            _ => IoKind::Write {
                dsync: self.dsync || request.fua,
            },
        }
    }

    /// Starts a request that holds its range lock, if it needs one.
    #[inline]
    fn start(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        match request.op {
            Op::Read | Op::Write if self.is_in_memory(request) => self.serve(cx, id),
            Op::Flush if self.shared.in_memory => self.finish(cx, id, 0),
            Op::Read if self.try_cache => self.serve_cached(cx, id),
            Op::Read | Op::Write if self.is_aligned(request) => self.push_whole(cx, id),
            Op::Read | Op::Write => {
                self.shared.bounced.fetch_add(1, Ordering::Relaxed);
                self.start_pieces(cx, id);
            }
            Op::Flush => self.flush(cx, id),
            Op::Discard | Op::WriteZeroes => self.start_pieces(cx, id),
            Op::BlockStatus => self.block_status(cx, id),
        }
    }

    #[inline]
    pub(super) fn push_whole(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        let io = Io {
            kind: self.kind(request),
            file: self.file,
            offset: request.at,
            len: request.len,
            iov: request.segments.as_ptr(),
            iov_len: request.segments.len() as u32,
        };
        // SAFETY: the source vouches for the memory until the request completes, and until then the
        // request's slot keeps its segments in place.
        unsafe { cx.engine.push(io, Token::request(id, Step::Whole as u16)) };
    }

    /// Begins a flush, or adds the request to the flush after the one in flight.
    ///
    /// With `Cache::None` each request has a flush of its own. With the page cache, a successful
    /// flush waits for all others in flight. Separate flushes for each request would then all wait
    /// for each other.
    fn flush(&mut self, cx: &mut Cx, id: RequestId) {
        if !self.shared.is_cached() || self.groups.join(id) {
            self.push_sync(cx, id, Step::Flush);
        }
    }

    /// Begins the flush of the requests that arrived during the last flush.
    fn flush_next_group(&mut self, cx: &mut Cx) {
        if let Some(first) = self.groups.begin_next() {
            self.push_sync(cx, first, Step::Flush);
            for n in 1..self.groups.in_flight.len() {
                cx.enter(self.groups.in_flight[n], Stage::Device);
            }
        }
    }

    pub(super) fn push_sync(&mut self, cx: &mut Cx, id: RequestId, step: Step) {
        if self.shared.is_cached() {
            self.state(id).flush = self.flusher.begin();
        }
        self.push_sync_again(cx, id, step);
    }

    fn push_sync_again(&mut self, cx: &mut Cx, id: RequestId, step: Step) {
        cx.enter(id, Stage::Device);
        self.push_without_data(cx, id, step, IoKind::Sync, 0..0);
    }

    pub(super) fn push_without_data(
        &mut self,
        cx: &mut Cx,
        id: RequestId,
        step: Step,
        kind: IoKind,
        range: Range<u64>,
    ) {
        let file = match kind {
            IoKind::Sync => self.flushed_by,
            _ => self.file,
        };
        let io = Io {
            kind,
            file,
            offset: range.start,
            len: range.end - range.start,
            iov: std::ptr::null(),
            iov_len: 0,
        };
        // SAFETY: the operation uses no memory.
        unsafe { cx.engine.push(io, Token::request(id, step as u16)) };
    }

    /// Pushes the rest of the request's transfer, from or to `state.iov`.
    pub(super) fn push_transfer(&mut self, cx: &mut Cx, id: RequestId, step: Step) {
        let kind = match step {
            Step::Rest | Step::BufferedWrite | Step::ZeroWrite => self.kind(&cx.slab[id]),
            _ => IoKind::Read,
        };
        let state = self.state(id);
        let io = Io {
            kind,
            offset: state.transfer.offset + state.transfer.done,
            len: state.transfer.len - state.transfer.done,
            iov: state.iov.as_ptr(),
            iov_len: state.iov.len() as u32,
            file: self.file,
        };
        // SAFETY: the state is boxed, and its iovecs change only between operations. The iovecs
        // name guest memory that the source vouches for, a buffer that the state owns, or static
        // zeroes.
        unsafe { cx.engine.push(io, Token::request(id, step as u16)) };
    }

    /// Returns the state of the request's slot, as the slot's last request left it.
    pub(super) fn state(&mut self, id: RequestId) -> &mut State {
        let index = id.0 as usize;
        if index >= self.states.len() {
            self.states.resize_with(index + 1, Default::default);
        }
        &mut self.states[index]
    }

    /// Continues or fails a whole request whose result was short, interrupted or an error.
    #[cold]
    fn whole_fell_short(&mut self, cx: &mut Cx, id: RequestId, result: i32) {
        let request = &cx.slab[id];
        let transfer = Transfer::new(request.at, request.len);
        self.state(id).transfer = transfer;
        self.rest_came_back(cx, id, result);
    }

    fn rest_came_back(&mut self, cx: &mut Cx, id: RequestId, result: i32) {
        let block = self.shared.planner.block;
        let state = self.state(id);
        match state.transfer.advance(result, block) {
            Progress::Complete => self.finish(cx, id, 0),
            Progress::Ended => self.ended(cx, id),
            Progress::Failed(errno) => self.fail(cx, id, errno),
            Progress::More => {
                // The request's own iovecs are not changed: its source may still need to know what
                // was written.
                let rest = pieces(&cx.slab[id].segments, state.transfer.done..u64::MAX);
                state.iov.clear();
                state.iov.extend(rest);
                self.push_transfer(cx, id, Step::Rest);
            }
        }
    }

    /// Handles a file that ends within the request: an error, or zeroes for a read that may miss
    /// bytes.
    #[cold]
    fn ended(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let state = &mut self.states[id.0 as usize];
        let at = state.transfer.offset + state.transfer.done;
        let missing = at..state.transfer.offset + state.transfer.len;
        if request.op != Op::Read || !self.shared.may_miss(missing) {
            return self.fail(cx, id, libc::EIO);
        }
        // SAFETY: the source vouches for the request's segments.
        unsafe { clear(&request.segments, state.transfer.done..u64::MAX) };
        self.finish(cx, id, 0);
    }

    fn synced(&mut self, cx: &mut Cx, id: RequestId, step: Step, result: i32) {
        if -result == libc::EINTR {
            return self.push_sync_again(cx, id, step);
        }
        if !self.shared.is_cached() {
            return self.flush_ended(cx, id, Ended::of(-result));
        }
        let number = self.state(id).flush;
        let ended = match -result {
            0 => match self.flusher.succeeded(number) {
                Verdict::Durable => Ended::Durable,
                Verdict::Lost => Ended::Failed(libc::EIO),
                Verdict::After(before) => Ended::After(before),
            },
            errno => {
                self.flusher.failed(number);
                Ended::Failed(errno)
            }
        };
        match step {
            Step::Flush => {
                while let Some(id) = self.groups.in_flight.pop() {
                    self.flush_ended(cx, id, ended);
                }
                self.flush_next_group(cx);
            }
            _ => self.flush_ended(cx, id, ended),
        }
        self.look_at_flushed(cx);
    }

    fn flush_ended(&mut self, cx: &mut Cx, id: RequestId, ended: Ended) {
        match ended {
            Ended::Durable => self.finish(cx, id, 0),
            Ended::Failed(errno) => self.fail(cx, id, errno),
            Ended::After(before) => self.flushed.push((id, before)),
        }
    }

    /// Completes requests whose flush has succeeded, unless the kernel may still have reported lost
    /// writes to another flush.
    fn look_at_flushed(&mut self, cx: &mut Cx) {
        let mut n = 0;
        while n < self.flushed.len() {
            let (id, before) = self.flushed[n];
            let errno = match self.flusher.verdict(before) {
                Verdict::After(_) => {
                    n += 1;
                    continue;
                }
                Verdict::Durable => 0,
                Verdict::Lost => libc::EIO,
            };
            self.flushed.swap_remove(n);
            match errno {
                0 => self.finish(cx, id, 0),
                errno => self.fail(cx, id, errno),
            }
        }
        if !self.flushed.is_empty() {
            cx.wake_at(cx.now() + cx.clock().ticks(LOOK_AT_FLUSHES));
        }
    }

    /// Logs a failed request and completes it.
    #[cold]
    pub(super) fn fail(&mut self, cx: &mut Cx, id: RequestId, errno: i32) {
        let request = &cx.slab[id];
        let (op, offset, len) = (request.op, request.at, request.len);
        let shared = &self.shared;
        // A synchronous write can consume the kernel's report of lost writes, so that the next
        // flush would not see it.
        let syncs = op == Op::Write && (self.dsync || request.fua);
        if syncs && errno == libc::EIO && shared.is_cached() {
            shared.flushes.fail();
        }
        match shared.early_end() {
            Some(end) if op == Op::Read && errno == libc::EIO && offset + len > end => {
                let size = shared.size.load(Ordering::Relaxed);
                shared.told_end.report(&shared.path, end, size);
            }
            // The guard of the file's end has logged the reason.
            _ if op == Op::Read && errno == libc::EIO && shared.ends_early(offset + len) => {}
            _ => report(&shared.path, op, offset, len, errno),
        }
        self.finish(cx, id, errno);
    }

    /// Releases the request's range lock and completes the request.
    #[inline]
    pub(super) fn finish(&mut self, cx: &mut Cx, id: RequestId, errno: i32) {
        if let Some(turns) = &mut self.turns
            && is_locked(cx.slab[id].op)
        {
            turns.release(id);
        }
        cx.complete(id, errno);
    }

    /// Requests the range lock, if the request needs one. Returns false if the request must wait.
    #[inline]
    fn lock(&mut self, cx: &Cx, id: RequestId) -> bool {
        let request = &cx.slab[id];
        let Some(turns) = self.turns.as_mut().filter(|_| is_locked(request.op)) else {
            return true;
        };
        let (start, end) = (request.at, request.at + request.len);
        let parts = (start | end) & self.block_mask != 0;
        let outer = start & !self.block_mask..end.next_multiple_of(self.block_mask + 1);
        turns.acquire(id, outer, parts)
    }

    /// Starts requests whose locks have been granted, including those that their completions
    /// unblock.
    #[inline]
    fn start_granted(&mut self, cx: &mut Cx) {
        while let Some(id) = self.turns.as_mut().and_then(Turns::next_granted) {
            self.start(cx, id);
        }
    }
}

impl Shared {
    /// Returns the offset in bytes beyond which requests are refused.
    #[inline]
    pub(super) fn limit(&self) -> u64 {
        match self.options.growable {
            true => i64::MAX as u64,
            false => self.size.load(Ordering::Relaxed),
        }
    }

    /// Returns whether a growable file ends before `at`, although bytes there may not be missing.
    fn ends_early(&self, at: u64) -> bool {
        let len = self.file.metadata().map_or(at, |m| m.len());
        self.options.growable && len < at && !self.may_miss(len..at)
    }

    /// Returns the file's length in bytes if the file was truncated to less than the disk's size.
    /// Queries the file system.
    fn early_end(&self) -> Option<u64> {
        let len = self.file.metadata().ok()?.len();
        let size = self.size.load(Ordering::Relaxed);
        let is_early = !self.options.growable && len.next_multiple_of(512) < size;
        (self.kind == Kind::Regular && is_early).then_some(len)
    }
}

/// Returns whether the operation changes data and so needs a range lock.
fn is_locked(op: Op) -> bool {
    matches!(op, Op::Write | Op::Discard | Op::WriteZeroes)
}

impl Channel for FileChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        let request = &cx.slab[id];
        if let Some(errno) = self.refusal(request) {
            return cx.complete(id, errno);
        }
        if request.op == Op::Flush && self.shared.flushes.have_failed() {
            return cx.complete(id, libc::EIO);
        }
        if self.lock(cx, id) {
            self.start(cx, id);
            self.start_granted(cx);
        }
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        if tag == Step::Whole as u16 {
            if i64::from(result) == cx.slab[id].len as i64 {
                self.finish(cx, id, 0);
            } else {
                self.whole_fell_short(cx, id, result);
            }
        } else if id == RequestId::NOBODY {
            // Events that are meant for other users of this token arrive here, too.
            if tag == Step::Granted as u16 {
                self.turns.iter_mut().for_each(Turns::look);
            }
        } else {
            match Step::of(tag) {
                Step::Whole | Step::Granted => unreachable!("handled above"),
                Step::Rest => self.rest_came_back(cx, id, result),
                step @ (Step::Flush | Step::FinalSync) => self.synced(cx, id, step, result),
                step => self.piece_came_back(cx, id, step, result),
            }
        }
        self.start_granted(cx);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.look_at_flushed(cx);
    }
}
