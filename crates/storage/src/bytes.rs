//! Byte granularity on top of a disk that takes whole blocks only.
//!
//! Requests for whole blocks pass through. Other reads are widened, and other discards narrowed, to
//! whole blocks. An unaligned write first reads the blocks that it changes partly, and places the
//! old bytes around its data. Until such a write completes, a range lock (`ranges`) keeps all
//! workers from changing these blocks, so that no neighbouring byte is lost.

mod part;

use crate::buffers::Buffers;
use crate::ranges::{Ranges, Turns};
use fathom_core::{
    Channel, ChannelLayer, Cx, Disk, DiskError, DiskLayer, Mark, Op, Owner, Request, RequestId,
    Token,
};
use part::Part;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// A disk whose requests may begin and end at any byte. Everything that changes the disk must go
/// through it.
pub struct ByteDisk {
    below: Arc<dyn Disk>,
    ranges: Arc<Ranges>,
}

impl ByteDisk {
    /// Wraps `below`, which takes whole blocks of `DiskInfo::block_size` bytes.
    pub fn new(below: Arc<dyn Disk>) -> ByteDisk {
        ByteDisk {
            below,
            ranges: Arc::default(),
        }
    }
}

impl DiskLayer for ByteDisk {
    fn below(&self) -> &dyn Disk {
        &*self.below
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let below = self.below.channel(cx)?;
        let block = u64::from(self.below.info().block_size);
        let channel = ByteChannel::new(below, block, &self.ranges, cx);
        let channel = channel.map_err(|source| DiskError::Io {
            path: PathBuf::from("a worker"),
            what: "cannot serve parts of blocks",
            source,
        })?;
        Ok(Box::new(channel))
    }
}

struct ByteChannel {
    below: Box<dyn Channel>,
    /// Block size in bytes: a power of two, 64 KiB at most.
    block: u64,
    turns: Turns,
    /// Tag of wake-ups for granted range locks.
    tag: u16,
    owner: Owner,
    buffers: Buffers,
    /// Unaligned requests in progress, by the index of their buffers.
    parts: Vec<Option<Part>>,
    /// Number of unaligned requests in progress.
    active: usize,
    /// Requests that wait for a buffer and already hold their range locks.
    starved: VecDeque<RequestId>,
}

fn changes(op: Op) -> bool {
    matches!(op, Op::Write | Op::WriteZeroes | Op::Discard)
}

fn range(request: &Request) -> Range<u64> {
    request.offset..request.offset + request.len
}

impl ByteChannel {
    fn new(
        below: Box<dyn Channel>,
        block: u64,
        ranges: &Arc<Ranges>,
        cx: &mut Cx,
    ) -> io::Result<ByteChannel> {
        let turns = ranges.turns()?;
        let tag = cx.new_tag();
        cx.engine.watch(turns.event(), Token::channel(tag))?;
        let buffers = Buffers::new()?;
        // Two children for each buffer: the first and the last block of a request.
        let owner = cx.reserve_children(2 * buffers.len())?;
        Ok(ByteChannel {
            below,
            block,
            turns,
            tag,
            owner,
            parts: std::iter::repeat_with(|| None)
                .take(buffers.len())
                .collect(),
            active: 0,
            starved: VecDeque::with_capacity(buffers.len()),
            buffers,
        })
    }

    #[inline]
    fn is_whole(&self, request: &Request) -> bool {
        (request.offset | request.len) & (self.block - 1) == 0
    }

    /// Returns the blocks that a range touches.
    fn outer(&self, range: &Range<u64>) -> Range<u64> {
        range.start & !(self.block - 1)..range.end.next_multiple_of(self.block)
    }

    /// Returns the blocks that lie completely in a range; may be empty.
    fn inner(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.next_multiple_of(self.block);
        start..(range.end & !(self.block - 1)).max(start)
    }

    /// Acquires the range lock of an unaligned request, if it changes data, and starts the request.
    #[cold]
    fn begin(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let range = range(request);
        let its_turn = match request.op {
            Op::Write | Op::WriteZeroes => self.turns.acquire(id, self.outer(&range), true),
            Op::Discard => self.turns.acquire(id, self.inner(&range), false),
            Op::Read | Op::BlockStatus | Op::Flush => true,
        };
        if its_turn {
            self.start(cx, id);
        }
    }

    /// Starts a request that holds its range lock.
    fn start(&mut self, cx: &mut Cx, id: RequestId) {
        if self.is_whole(&cx.slab[id]) {
            return self.below.submit(cx, id);
        }
        let Some(buffer) = self.buffers.take() else {
            return self.starved.push_back(id);
        };
        let n = buffer.number();
        let request = &cx.slab[id];
        let part = Part::new(id, range(request), buffer);
        let (op, outer, inner) = (request.op, self.outer(&part.range), self.inner(&part.range));
        self.parts[n] = Some(part);
        self.active += 1;
        match op {
            Op::Write | Op::WriteZeroes => self.read_edges(cx, n),
            Op::Discard => self.submit_rest(cx, n, inner),
            Op::Read => {
                self.surround(cx, n);
                self.submit_rest(cx, n, outer);
            }
            Op::BlockStatus | Op::Flush => self.submit_rest(cx, n, outer),
        }
    }

    /// Processes everything that has completed since `mark`, until that completes nothing more.
    #[inline]
    fn settle(&mut self, cx: &mut Cx, mut mark: Mark) {
        loop {
            let mut completed = cx.completed_since(mark);
            mark = cx.mark();
            while let Some(id) = completed.next(cx) {
                let request = &cx.slab[id];
                if request.owner == Owner::SOURCE {
                    if changes(request.op) {
                        self.turns.release(id);
                    }
                    if self.active > 0 {
                        self.end(cx, id);
                    }
                }
            }
            while let Some(child) = cx.child_done(self.owner) {
                self.edge_done(cx, child);
            }
            while let Some(id) = self.turns.next_granted() {
                self.start(cx, id);
            }
            if cx.mark() == mark {
                return;
            }
        }
    }
}

impl ChannelLayer for ByteChannel {
    #[inline]
    fn below(&mut self) -> &mut dyn Channel {
        &mut *self.below
    }

    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        let mark = cx.mark();
        let request = &cx.slab[id];
        if !self.is_whole(request) {
            self.begin(cx, id);
        } else if !changes(request.op) || self.turns.acquire(id, range(request), false) {
            self.below.submit(cx, id);
        }
        self.settle(cx, mark);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        let mark = cx.mark();
        if id == RequestId::NOBODY && tag == self.tag {
            self.turns.look();
        } else {
            self.below.complete(cx, id, tag, result);
        }
        self.settle(cx, mark);
    }

    fn timer(&mut self, cx: &mut Cx) {
        let mark = cx.mark();
        self.below.timer(cx);
        self.settle(cx, mark);
    }

    /// Only passes the call on: requests that wait here wait for I/O in progress, not for time.
    fn drain(&mut self, cx: &mut Cx, source: u16) {
        let mark = cx.mark();
        self.below.drain(cx, source);
        self.settle(cx, mark);
    }
}
