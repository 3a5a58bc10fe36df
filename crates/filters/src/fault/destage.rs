//! Writes cached sectors to the disk below.

use super::cache::{Cache, Run, SECTOR};
use fathom_core::AlignedBuffer;
use fathom_core::{Channel, Cx, Op, Owner, RequestId};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of writes of one worker in flight.
const CHILDREN: usize = 32;

/// The action after all writes have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Flushes the disk below, then completes the request.
    Flush,
    /// Completes the request.
    Complete,
    /// Retries the request, since there is room for it now.
    Again,
}

/// A destage in progress; `Cache::begin_writing` has been called for it.
struct Work {
    request: RequestId,
    then: Then,
    version: u64,
    /// Selects the sectors that are on the disk below when the destage ends.
    written: Box<dyn Fn(u64) -> bool>,
    runs: Vec<Run>,
    in_flight: Vec<(RequestId, Option<AlignedBuffer>)>,
    errno: i32,
}

/// The destage of one worker.
pub(super) struct Destage {
    cache: Arc<Cache>,
    owner: Owner,
    work: Option<Work>,
    /// A request to be retried.
    again: Option<RequestId>,
}

impl Destage {
    pub(super) fn new(cache: Arc<Cache>, cx: &mut Cx) -> io::Result<Destage> {
        Ok(Destage {
            cache,
            owner: cx.reserve_children(CHILDREN)?,
            work: None,
            again: None,
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.work.is_none()
    }

    /// Writes the cached sectors for which `goes` returns true.
    pub(super) fn start(
        &mut self,
        cx: &mut Cx,
        request: RequestId,
        below: &mut dyn Channel,
        then: Then,
        goes: impl Fn(u64) -> bool + 'static,
    ) {
        let (version, runs) = self.cache.runs(&goes);
        self.work = Some(Work {
            request,
            then,
            version,
            written: Box::new(goes),
            runs,
            in_flight: Vec::new(),
            errno: 0,
        });
        self.feed(cx, below);
    }

    /// Executes a long request of zeroes on the disk below, bypassing the cache.
    pub(super) fn past(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let request = &cx.slab[id];
        let (op, fua, unmap) = (request.op, request.fua, request.unmap);
        let range = request.offset..request.offset + request.len;
        let sectors = range.start / SECTOR as u64..range.end / SECTOR as u64;
        self.work = Some(Work {
            request: id,
            then: Then::Complete,
            version: self.cache.version(),
            written: Box::new(move |n| sectors.contains(&n)),
            runs: Vec::new(),
            in_flight: Vec::new(),
            errno: 0,
        });
        let child = self.child(cx, op, range);
        (cx.slab[child].fua, cx.slab[child].unmap) = (fua, unmap);
        self.submit(cx, below, child, None);
    }

    fn child(&self, cx: &mut Cx, op: Op, range: Range<u64>) -> RequestId {
        let id = cx.slab.take().expect("room was made for all children");
        let child = &mut cx.slab[id];
        child.stamps = Default::default();
        child.op = op;
        (child.fua, child.unmap, child.error) = (false, false, 0);
        (child.owner, child.source) = (self.owner, 0);
        (child.offset, child.at) = (range.start, range.start);
        child.len = range.end - range.start;
        child.segments.clear();
        id
    }

    fn submit(
        &mut self,
        cx: &mut Cx,
        below: &mut dyn Channel,
        child: RequestId,
        buffer: Option<AlignedBuffer>,
    ) {
        let work = self.work.as_mut().expect("it is under way");
        work.in_flight.push((child, buffer));
        below.submit(cx, child);
    }

    /// Submits as many writes as may be in flight. `settle` handles those that complete at once.
    fn feed(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        while let Some(work) = &mut self.work {
            if work.in_flight.len() >= CHILDREN {
                return;
            }
            let Some(run) = work.runs.pop() else { return };
            let len = run.data.len();
            let mut buffer = AlignedBuffer::new(len);
            buffer.bytes_mut().copy_from_slice(&run.data);
            let start = run.first * SECTOR as u64;
            let child = self.child(cx, Op::Write, start..start + len as u64);
            cx.slab[child].segments.push(buffer.iovec(len));
            self.submit(cx, below, child, Some(buffer));
        }
    }

    /// Handles completed writes. Returns true if the destage has ended.
    pub(super) fn settle(&mut self, cx: &mut Cx, below: &mut dyn Channel) -> bool {
        if self.work.is_none() {
            return false;
        }
        loop {
            while let Some(child) = cx.child_done(self.owner) {
                let errno = cx.slab[child].error;
                cx.slab.put(child);
                let work = self.work.as_mut().expect("it has children");
                work.in_flight.retain(|(id, _)| *id != child);
                work.errno = if work.errno != 0 { work.errno } else { errno };
            }
            self.feed(cx, below);
            let work = self.work.as_mut().expect("nothing has ended it");
            if !work.in_flight.is_empty() {
                // Continues if some of them have completed at once.
                match cx.has_child_done(self.owner) {
                    true => continue,
                    false => return false,
                }
            }
            if work.then == Then::Flush && work.errno == 0 {
                work.then = Then::Complete;
                let flush = self.child(cx, Op::Flush, 0..0);
                self.submit(cx, below, flush, None);
                continue;
            }
            self.end(cx);
            return true;
        }
    }

    fn end(&mut self, cx: &mut Cx) {
        let Some(work) = self.work.take() else { return };
        match work.errno {
            0 => self.cache.end_writing(work.version, work.written),
            _ => self.cache.end_writing(0, |_| false),
        }
        match (work.then, work.errno) {
            (Then::Again, 0) => self.again = Some(work.request),
            _ => cx.complete(work.request, work.errno),
        }
    }

    pub(super) fn take_again(&mut self) -> Option<RequestId> {
        self.again.take()
    }
}

/// The kernel may still read the buffers of children in flight, so they are leaked.
impl Drop for Destage {
    fn drop(&mut self) {
        let work = self.work.take();
        for (_, buffer) in work.into_iter().flat_map(|work| work.in_flight) {
            std::mem::forget(buffer);
        }
    }
}
