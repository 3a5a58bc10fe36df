//! A worker's handling of requests while some writes are in memory only.

use super::cache::{Cache, SECTOR, Sector, Writes};
use super::destage::{Destage, Then};
use crate::random::mix;
use fathom_core::extents::{Extents, Status};
use fathom_core::segments::{read_at, write_at};
use fathom_core::{Channel, Cx, Op, Request, RequestId};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Interval after which a worker checks again whether another one has finished writing.
const RETRY: Duration = Duration::from_micros(100);

/// Maximum length in bytes of a range of zeroes in the cache. Longer ranges go directly to the disk
/// below.
const MAX_ZEROES: u64 = 1 << 20;

/// Mode, size of the cache in bytes, and seed.
pub(super) type Limits = (Writes, u64, u64);

/// A read in flight below, and the cached sectors of its range when it began.
struct Read {
    id: RequestId,
    cached: Vec<(u64, Box<Sector>)>,
}

pub(super) struct Volatile {
    cache: Arc<Cache>,
    destage: Destage,
    /// Requests that wait for the end of another destage.
    waiting: VecDeque<RequestId>,
    reads: Vec<Read>,
    /// The most recent limits.
    limits: Limits,
    /// Physical block size of the disk in sectors. A physical block is written as a whole and never
    /// torn.
    unit: u64,
}

fn sectors(request: &Request) -> Range<u64> {
    let size = SECTOR as u64;
    request.offset / size..(request.offset + request.len) / size
}

/// Reports the range as data, because the disk below does not know the cached sectors.
fn all_is_data(cx: &mut Cx, id: RequestId) {
    let request = &cx.slab[id];
    // SAFETY: the request is in flight, and completes afterwards.
    let mut extents = unsafe { Extents::of(&request.segments, request.len) };
    extents.push(Status::DATA, request.len);
    cx.complete(id, 0);
}

impl Volatile {
    pub(super) fn new(cache: Arc<Cache>, cx: &mut Cx, block: u32) -> io::Result<Volatile> {
        Ok(Volatile {
            destage: Destage::new(cache.clone(), cx)?,
            cache,
            waiting: VecDeque::new(),
            reads: Vec::new(),
            limits: (Writes::Safe, 0, 0),
            unit: (u64::from(block) / SECTOR as u64).max(1),
        })
    }

    #[inline]
    pub(super) fn submit(
        &mut self,
        cx: &mut Cx,
        id: RequestId,
        below: &mut dyn Channel,
        limits: Limits,
    ) {
        if limits.0 == Writes::Safe && self.cache.is_empty() {
            return below.submit(cx, id);
        }
        self.limits = limits;
        match cx.slab[id].op {
            Op::Read => self.read(cx, id, below),
            Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => self.write(cx, id, below),
            Op::BlockStatus => all_is_data(cx, id),
        }
    }

    fn read(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let range = sectors(&cx.slab[id]);
        let cached = self.cache.get(range.clone());
        let is_all = cached.len() as u64 == range.end - range.start;
        if !cached.is_empty() {
            self.reads.push(Read { id, cached });
        }
        match is_all {
            true => cx.complete(id, 0),
            false => below.submit(cx, id),
        }
    }

    /// Overlays the data from the disk below with the cached sectors.
    pub(super) fn read_done(&mut self, cx: &mut Cx, id: RequestId) {
        let Some(n) = self.reads.iter().position(|read| read.id == id) else {
            return;
        };
        let read = self.reads.swap_remove(n);
        let request = &cx.slab[id];
        let first = sectors(request).start;
        for (sector, data) in read.cached {
            let at = (sector - first) * SECTOR as u64;
            // SAFETY: the source guarantees that its segments are valid.
            unsafe { write_at(&request.segments, at, &*data) };
        }
    }

    /// Handles all requests except reads.
    fn write(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let (writes, size, seed) = self.limits;
        let request = &cx.slab[id];
        let range = sectors(request);
        let is_stored =
            request.op != Op::Flush && (request.op == Op::Write || request.len <= MAX_ZEROES);
        let has_room = self
            .cache
            .has_room((range.end - range.start) as usize, size);
        let is_durable = request.fua || writes == Writes::Safe;
        let is_torn = writes == Writes::Torn && request.op == Op::Write;
        if is_stored && has_room && !is_durable && !is_torn {
            self.store(request);
            return cx.complete(id, 0);
        }
        if !self.destage.is_idle() || !self.cache.begin_writing() {
            self.waiting.push_back(id);
            return cx.wake_at(cx.now() + cx.clock().ticks(RETRY));
        }
        let fua = request.fua;
        if !is_stored && request.op != Op::Flush {
            self.destage.past(cx, id, below);
        } else if is_stored && is_torn && has_room && !is_durable {
            let version = self.store(request);
            let unit = self.unit;
            let reaches = move |n: u64| mix(mix(seed ^ version) ^ (n / unit)) & 1 == 0;
            let goes = move |n: u64| range.contains(&n) && reaches(n);
            self.destage.start(cx, id, below, Then::Complete, goes);
        } else if is_stored && has_room {
            self.store(request);
            let then = if fua { Then::Flush } else { Then::Complete };
            self.destage.start(cx, id, below, then, |_| true);
        } else if is_stored {
            self.destage.start(cx, id, below, Then::Again, |_| true);
        } else {
            self.destage.start(cx, id, below, Then::Flush, |_| true);
        }
    }

    fn store(&self, request: &Request) -> u64 {
        let range = sectors(request);
        let first = range.start;
        self.cache.put(range, |n, data| match request.op {
            // SAFETY: the source guarantees that its segments are valid.
            Op::Write => unsafe {
                read_at(&request.segments, (n - first) * SECTOR as u64, &mut *data);
            },
            _ => data.fill(0),
        })
    }

    /// Retries requests that waited for a destage.
    pub(super) fn retry(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        for _ in 0..self.waiting.len() {
            if !self.destage.is_idle() {
                break;
            }
            if let Some(id) = self.waiting.pop_front() {
                self.write(cx, id, below);
            }
        }
        if !self.waiting.is_empty() {
            cx.wake_at(cx.now() + cx.clock().ticks(RETRY));
        }
    }

    pub(super) fn settle(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        if self.destage.settle(cx, below) {
            self.waiting.extend(self.destage.take_again());
            self.retry(cx, below);
        }
    }
}
