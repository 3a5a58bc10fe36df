//! The disk as it was at the instant of the backup.

use fathom_core::extents::extents;
use fathom_core::segments::pieces;
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Extents, Mark, Op, Owner, Request, RequestId, Stage,
    Status,
};
use fathom_stack::{Dirty, Past};
use fathom_storage::FileDisk;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Maximum reads of the scratch file in flight per worker; further reads wait for these.
const CHILDREN: usize = 64;

/// A read-only disk with the data of the instant.
///
/// Each read first reads the disk. The parts whose original data is in the scratch file by then
/// are read again from there: they may have been overwritten earlier, and other parts were not.
pub(super) struct View {
    pub(super) past: Arc<Past>,
    /// The source disk, which the backup keeps activated while this view exists.
    pub(super) disk: Arc<dyn Disk>,
    pub(super) scratch: Arc<FileDisk>,
    /// The contents of the bitmap at the instant, if the backup has one.
    pub(super) dirty: Arc<OnceLock<Dirty>>,
}

impl Disk for View {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size: self.past.size(),
            read_only: true,
            discard: None,
            write_zeroes: None,
            ..self.disk.info()
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        match (self.past.problem(), self.past.is_over()) {
            (None, false) => Ok(()),
            (problem, _) => Err(DiskError::Unusable {
                path: PathBuf::from("backup"),
                problem: problem.unwrap_or("the backup has ended").into(),
            }),
        }
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let (disk, scratch) = (self.disk.channel(cx)?, self.scratch.channel(cx)?);
        let owner = cx.reserve_children(CHILDREN);
        Ok(Box::new(ViewChannel {
            past: self.past.clone(),
            dirty: self.dirty.clone(),
            disk,
            scratch,
            owner: owner.map_err(|source| DiskError::Io {
                path: PathBuf::from("backup"),
                what: "cannot open the scratch file for reading",
                source,
            })?,
            children: 0,
            readings: Vec::new(),
            todo: VecDeque::new(),
            back: Vec::new(),
        }))
    }
}

/// The state of a request.
#[derive(Clone, Copy, Default)]
struct Reading {
    /// Whether the request has not been examined since the disk completed it.
    is_new: bool,
    /// Number of parts that must be read again from the scratch file.
    left: u32,
    errno: i32,
}

struct ViewChannel {
    past: Arc<Past>,
    dirty: Arc<OnceLock<Dirty>>,
    disk: Box<dyn Channel>,
    scratch: Box<dyn Channel>,
    owner: Owner,
    children: usize,
    /// The state of each request, by [`RequestId`].
    readings: Vec<Reading>,
    /// Parts whose read of the scratch file has not started.
    todo: VecDeque<(RequestId, Range<u64>)>,
    /// Requests whose data was saved to the scratch file after they were submitted.
    back: Vec<RequestId>,
}

fn range(request: &Request) -> Range<u64> {
    request.offset..request.offset + request.len
}

impl ViewChannel {
    #[inline]
    fn reading(&mut self, id: RequestId) -> &mut Reading {
        &mut self.readings[id.0 as usize]
    }

    /// Examines the requests completed since `mark`.
    fn settle(&mut self, cx: &mut Cx, mut mark: Mark) {
        loop {
            let mut back = std::mem::take(&mut self.back);
            cx.take_back(mark, |id, request| self.stands(id, request), &mut back);
            mark = cx.mark();
            for id in back.drain(..) {
                self.look_again(cx, id);
            }
            self.back = back;
            while let Some(child) = cx.child_done(self.owner) {
                self.part_done(cx, child);
            }
            self.start(cx);
            if cx.mark() == mark {
                return;
            }
        }
    }

    /// Returns whether the result of the disk is final, because nothing in its range has changed.
    fn stands(&mut self, id: RequestId, request: &Request) -> bool {
        // Children of this layer and of lower layers are handled by those layers.
        let is_ours = request.owner == Owner::SOURCE || request.owner > self.owner;
        if !is_ours || !std::mem::take(&mut self.reading(id).is_new) || request.error != 0 {
            return true;
        }
        // The data must have been read before the bits that say which blocks are saved.
        fence(Ordering::Acquire);
        match request.op {
            Op::BlockStatus if self.dirty.get().is_some() => false,
            Op::Read | Op::BlockStatus => {
                !self.past.is_over() && self.past.part(range(request), true).is_none()
            }
            _ => true,
        }
    }

    fn look_again(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        if self.past.is_over() {
            return cx.complete(id, libc::EIO);
        }
        if request.op == Op::BlockStatus {
            // SAFETY: the request is completed, and its source has not seen that yet.
            unsafe { retell(&self.past, self.dirty.get(), request) };
            return cx.complete(id, 0);
        }
        let mut rest = range(request);
        let mut left = 0;
        while let Some(part) = self.past.part(rest.clone(), true) {
            rest.start = part.end;
            left += 1;
            self.todo.push_back((id, part));
        }
        *self.reading(id) = Reading {
            left,
            ..Reading::default()
        };
    }

    /// Starts the waiting reads of the scratch file, up to their maximum number.
    fn start(&mut self, cx: &mut Cx) {
        while self.children < CHILDREN
            && let Some((id, part)) = self.todo.pop_front()
        {
            let child = cx.slab.take().expect("reserved by `channel`");
            let parent = &cx.slab[id];
            let (source, queue, offset) = (parent.source, parent.queue, parent.offset);
            let segments = parent.segments.clone();
            let request = &mut cx.slab[child];
            request.stamps = Default::default();
            request.op = Op::Read;
            (request.unmap, request.fua, request.error) = (false, false, 0);
            (request.owner, request.source, request.queue) = (self.owner, source, queue);
            let len = part.end - part.start;
            (request.offset, request.at, request.len) = (part.start, part.start, len);
            request.cookie = id.0.into();
            request.segments.clear();
            let from = part.start - offset;
            request.segments.extend(pieces(&segments, from..from + len));
            self.children += 1;
            self.scratch.submit(cx, child);
        }
    }

    fn part_done(&mut self, cx: &mut Cx, child: RequestId) {
        let request = &cx.slab[child];
        let (id, error) = (RequestId(request.cookie as u32), request.error);
        cx.slab.put(child);
        self.children -= 1;
        let reading = self.reading(id);
        reading.left -= 1;
        if error != 0 {
            reading.errno = error;
        }
        if reading.left == 0 {
            let errno = reading.errno;
            cx.complete(id, errno);
        }
    }
}

/// Rewrites the block status reply of a request for the instant of the backup.
///
/// Saved blocks are reported as data, even if the disk has a hole there now. Blocks that the bitmap
/// marks are reported as dirty.
///
/// # Safety
/// The request is completed, and its source has not seen that yet.
unsafe fn retell(past: &Past, dirty: Option<&Dirty>, request: &Request) {
    let segment = request.segments[0];
    // SAFETY: as required of the caller.
    let answer = unsafe { std::slice::from_raw_parts(segment.iov_base.cast(), segment.iov_len) };
    let told: Vec<_> = extents(answer).collect();
    // SAFETY: as required of the caller.
    let mut now = unsafe { Extents::of(&request.segments, request.len) };
    let mut at = request.offset;
    for (status, len) in told {
        let end = at + len;
        while at < end {
            let kept = past.part(at..end, true);
            let (status, next) = match kept {
                Some(kept) if kept.start == at => (Status::DATA, kept.end),
                Some(kept) => (status, kept.start),
                None => (status, end),
            };
            let (dirty, next) = dirty.map_or((false, next), |dirty| dirty.part(at..next));
            let status = Status { dirty, ..status };
            now.push(status, next - at);
            at = next;
        }
    }
}

impl Channel for ViewChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        let index = id.0 as usize;
        if index >= self.readings.len() {
            let len = cx.slab.capacity().max(index + 1);
            self.readings.resize(len, Reading::default());
        }
        let refused = match cx.slab[id].op {
            Op::Read | Op::BlockStatus => None,
            Op::Flush => Some(0),
            Op::Write | Op::Discard | Op::WriteZeroes => Some(libc::EROFS),
        };
        if let Some(errno) = refused {
            cx.enter(id, Stage::Device);
            return cx.complete(id, errno);
        }
        self.reading(id).is_new = true;
        let mark = cx.mark();
        self.disk.submit(cx, id);
        self.settle(cx, mark);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        let mark = cx.mark();
        match id != RequestId::NOBODY && cx.slab[id].owner == self.owner {
            true => self.scratch.complete(cx, id, tag, result),
            false => self.disk.complete(cx, id, tag, result),
        }
        self.settle(cx, mark);
    }

    fn timer(&mut self, cx: &mut Cx) {
        let mark = cx.mark();
        self.disk.timer(cx);
        self.scratch.timer(cx);
        self.settle(cx, mark);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        let mark = cx.mark();
        self.disk.drain(cx, source);
        self.scratch.drain(cx, source);
        self.settle(cx, mark);
    }
}
