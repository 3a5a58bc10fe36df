//! A worker's channel to an image.
//!
//! A request that can be mapped at once is passed directly to the storage at its host offset. Every
//! other request is a task.

use super::active::{Active, Layer};
use super::disk::Shared;
use super::epoch::{InEpoch, InFlight};
use super::io::{Errno, Payload};
use super::jobs::Job;
use super::lookup::{Found, Lookup};
use super::memo::{EPOCH, STORAGE, UNCOUNTED};
use super::problem::unusable;
use super::segments::Source;
use super::storage::Storage;
use super::tables::Tables;
use super::task::Executor;
use super::worker_io::{CHILDREN, TaskIo, WorkerIo};
use super::write::Write;
use super::zero::Empty;
use crate::{GuestOffset, HostOffset};
use fathom_core::segments::clear;
use fathom_core::{Channel, Cx, DiskError, Extents, Mark, Op, Request, RequestId, Stage, Token};
use fathom_units::cause;
use smallvec::SmallVec;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time for which a task pauses while it waits for other requests.
const PAUSE: Duration = Duration::from_millis(1);

/// The chain in use, as this worker sees it.
struct Current {
    active: Arc<Active>,
    lookup: Lookup,
    counts: Arc<InFlight>,
    /// Whether clusters may become free while the chain is in use.
    frees: bool,
}

pub(super) struct ImageChannel {
    shared: Arc<Shared>,
    /// Generation of the activation that `current` belongs to.
    generation: u64,
    current: Option<Current>,
    storages: Vec<Box<dyn Channel>>,
    executor: Executor,
    /// Tag of the wake-ups of tasks.
    tag: u16,
    io: Rc<WorkerIo>,
    /// Position in the list of completed requests before the storages ran.
    mark: Mark,
}

impl ImageChannel {
    /// Creates a channel for a disk in these files; `path` names the disk in errors.
    pub(super) fn boxed(
        shared: &Arc<Shared>,
        storages: &[Arc<dyn Storage>],
        path: &Path,
        cx: &mut Cx,
    ) -> Result<Box<dyn Channel>, DiskError> {
        let channels = storages.iter().map(|s| s.disk().channel(cx));
        let channels = channels.collect::<Result<Vec<_>, _>>()?;
        let channel = ImageChannel::new(shared.clone(), channels, cx);
        let channel = channel.map_err(|error| {
            unusable(
                path,
                format!("cannot start a worker's channel: {}", cause(error)),
            )
        })?;
        Ok(Box::new(channel))
    }

    fn new(
        shared: Arc<Shared>,
        storages: Vec<Box<dyn Channel>>,
        cx: &mut Cx,
    ) -> io::Result<ImageChannel> {
        let owner = cx.reserve_children(CHILDREN + 1)?;
        let executor = Executor::new()?;
        shared.jobs.register(executor.ready());
        let tag = cx.new_tag();
        cx.engine.watch(executor.fd(), Token::channel(tag))?;
        Ok(ImageChannel {
            shared,
            generation: 0,
            current: None,
            storages,
            executor,
            tag,
            io: Rc::new(WorkerIo::new(owner)),
            mark: Mark::default(),
        })
    }

    /// Replaces this worker's view of the chain after an activation or deactivation.
    #[cold]
    fn renew(&mut self, generation: u64) {
        self.generation = generation;
        self.current = self.shared.active().map(|active| Current {
            lookup: Lookup::new(&active.layers),
            counts: active.epochs.register(),
            frees: active.layers.iter().any(Layer::is_writable),
            active,
        });
    }

    /// Maps the request, if it needs a single place; otherwise returns `Found::Else`.
    #[inline]
    fn find(&mut self, request: &Request) -> Result<Found, Errno> {
        let Some(current) = &mut self.current else {
            return Err(libc::EIO);
        };
        let (guest, len) = (GuestOffset(request.offset), request.len);
        let size = self.shared.size();
        if guest.0 > size || len > size - guest.0 {
            return Err(libc::EIO);
        }
        let active = &*current.active;
        let top = active.top();
        if request.op == Op::Read {
            return Ok(match top {
                Some(_) if self.shared.copies_on_read => Found::Else,
                _ => current.lookup.read(active, guest, len),
            });
        }
        if request.op == Op::BlockStatus {
            return Ok(match top {
                Some(_) => Found::Else,
                None => current.lookup.write(active, guest, len),
            });
        }
        if self.shared.read_only && request.op != Op::Flush {
            return Err(libc::EROFS);
        }
        if let Some(tables) = top
            && tables.corrupt.load(Ordering::Relaxed)
        {
            return Err(libc::EIO);
        }
        Ok(match request.op {
            Op::Write if self.shared.compress => match top.and_then(Tables::compress_unit) {
                Some(_) => Found::Else,
                None => return Err(libc::ENOTSUP),
            },
            Op::Write => match current.lookup.write(active, guest, len) {
                // A write with FUA needs a flush of metadata, too, unless `is_durable`. The order
                // matters: code that links a cluster marks the image dirty before the look-up can
                // find its entry, so the state is read after the look-up.
                _ if request.fua && !is_durable(top) => Found::Else,
                found => found,
            },
            // (All writes that the flush covers completed before the guest sent the flush.)
            Op::Flush if is_durable(top) => Found::Data {
                storage: active.storage(),
                at: HostOffset(0),
            },
            Op::Discard | Op::WriteZeroes if top.is_none() => {
                current.lookup.write(active, guest, len)
            }
            _ => Found::Else,
        })
    }

    fn spawn(&mut self, cx: &mut Cx, id: RequestId) {
        let current = self.current.as_ref().expect("`find` has seen it");
        let request = &mut cx.slab[id];
        let counted = match std::mem::replace(&mut request.memo[EPOCH], UNCOUNTED) {
            UNCOUNTED => None,
            parity => {
                let epochs = current.active.epochs.clone();
                Some(InEpoch::adopt(epochs, current.counts.clone(), parity))
            }
        };
        let task = Task {
            shared: self.shared.clone(),
            active: current.active.clone(),
            counted,
            io: TaskIo {
                worker: self.io.clone(),
                parent: id,
            },
            op: request.op,
            fua: request.fua,
            compress: self.shared.compress,
            unmap: request.unmap && self.shared.discard,
            guest: GuestOffset(request.offset),
            len: request.len,
            payload: Payload {
                segments: request.segments.clone(),
                keep: SmallVec::new(),
            },
        };
        self.executor.spawn(task.run());
    }

    /// Runs tasks and their operations until none of them can make progress.
    fn drive(&mut self, cx: &mut Cx) {
        loop {
            let ran = self.executor.run();
            let submitted = self.io.submit(cx, &mut self.storages);
            let reaped = self.io.reap(cx);
            if !ran && !submitted && !reaped {
                break;
            }
        }
        while let Some((id, errno)) = self.io.next_finished() {
            cx.complete(id, errno);
        }
        while let Some(id) = self.io.next_left() {
            cx.slab.put(id);
        }
        if self.io.is_pausing() {
            cx.wake_at(cx.now() + cx.clock().ticks(PAUSE));
        }
    }

    /// Starts a job, which belongs to no request.
    ///
    /// While the disk is not active, the job is dropped. The caller that waits for the job learns
    /// this from the closed outcome channel.
    fn spawn_job(&mut self, cx: &mut Cx, job: Job) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.renew(generation);
        }
        let Some(current) = &self.current else { return };
        let (active, counts) = (current.active.clone(), current.counts.clone());
        let shared = self.shared.clone();
        let io = TaskIo {
            worker: self.io.clone(),
            parent: self.io.enter(cx),
        };
        self.executor.spawn(async move {
            let outcome = active.resize(&io, &shared, &counts, &job).await;
            io.worker.leave(io.parent);
            // The caller may have stopped waiting.
            let _ = job.outcome.send(outcome);
        });
    }

    /// Enters the request into the current epoch.
    ///
    /// The request is about to look clusters up, which must not be reused before it completes.
    #[inline]
    fn count(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &mut cx.slab[id];
        request.memo[EPOCH] = match &self.current {
            Some(current) if current.frees && request.op != Op::Flush => {
                current.active.epochs.enter(&current.counts)
            }
            _ => UNCOUNTED,
        };
    }

    /// Leaves the epochs of the requests that have completed since the mark.
    #[inline]
    fn account(&mut self, cx: &mut Cx) {
        let Some(current) = &self.current else { return };
        let mut completed = cx.completed_since(self.mark);
        while let Some(id) = completed.next(cx) {
            let epoch = std::mem::replace(&mut cx.slab[id].memo[EPOCH], UNCOUNTED);
            if epoch != UNCOUNTED {
                current.active.epochs.leave(&current.counts, epoch);
            }
        }
    }
}

/// Returns whether a flush of the image's own file makes a write in place durable.
#[inline]
fn is_durable(top: Option<&Tables>) -> bool {
    top.is_none_or(|tables| tables.dirty.is_clean() && !tables.has_data_file)
}

impl Channel for ImageChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        self.mark = cx.mark();
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.renew(generation);
        }
        self.count(cx, id);
        match self.find(&cx.slab[id]) {
            Ok(Found::Data { storage, at }) => {
                let request = &mut cx.slab[id];
                (request.at, request.memo[STORAGE]) = (at.0, storage);
                self.storages[usize::from(storage)].submit(cx, id);
            }
            Ok(Found::Zero) => {
                cx.enter(id, Stage::Device);
                // SAFETY: the source vouches for the request's segments.
                unsafe { clear(&cx.slab[id].segments, 0..u64::MAX) };
                cx.complete(id, 0);
            }
            Ok(Found::Else) => {
                self.spawn(cx, id);
                self.drive(cx);
            }
            Err(errno) => cx.complete(id, errno),
        }
        self.account(cx);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.mark = cx.mark();
        if id != RequestId::NOBODY {
            let storage = usize::from(cx.slab[id].memo[STORAGE]);
            self.storages[storage].complete(cx, id, tag, result);
        } else if tag != self.tag {
            // This wake-up was requested by one of the storages.
            for storage in &mut self.storages {
                storage.complete(cx, id, tag, result);
            }
        } else if let Some(job) = self.shared.jobs.take() {
            self.spawn_job(cx, job);
        }
        if !self.executor.is_idle() {
            self.drive(cx);
        }
        self.account(cx);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.mark = cx.mark();
        if self.io.is_pausing() {
            self.io.go_on();
        }
        for storage in &mut self.storages {
            storage.timer(cx);
        }
        self.drive(cx);
        self.account(cx);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.mark = cx.mark();
        for storage in &mut self.storages {
            storage.drain(cx, source);
        }
        self.drive(cx);
        self.account(cx);
    }
}

impl Drop for ImageChannel {
    fn drop(&mut self) {
        if self.io.in_flight() > 0 {
            // The kernel may still be using the buffers.
            std::mem::forget(self.io.clone());
        }
    }
}

/// A request that takes several steps.
struct Task {
    shared: Arc<Shared>,
    active: Arc<Active>,
    counted: Option<InEpoch>,
    io: TaskIo,
    op: Op,
    fua: bool,
    compress: bool,
    unmap: bool,
    guest: GuestOffset,
    len: u64,
    payload: Payload,
}

impl Task {
    async fn run(mut self) {
        let errno = self.serve().await.err().unwrap_or(0);
        self.counted = None;
        let worker = &self.io.worker;
        worker.finish(self.io.parent, errno);
        // The request completes before its discards, which are in flight by then. A deactivation
        // that follows therefore finds them and waits for them.
        if (self.op == Op::Flush || self.fua)
            && let Some(tables) = self.active.top()
        {
            tables.discard_freed(&worker.for_nobody()).await;
        }
    }

    async fn serve(&mut self) -> Result<(), Errno> {
        let (active, io) = (self.active.clone(), &self.io);
        if self.op == Op::Read {
            if let (true, Some(tables)) = (self.shared.copies_on_read, active.top()) {
                let range = self.guest..self.guest + self.len;
                let given_up = tables.given_up.load(Ordering::Acquire);
                let copied = active.copy_up(io, tables, range.clone()).await;
                match (copied, &mut self.counted) {
                    (Err(libc::ENOSPC), Some(counted)) => {
                        counted.outside(tables.reclaim(io, given_up)).await?;
                        active.copy_up(io, tables, range).await?;
                    }
                    (copied, _) => copied?,
                }
            }
            return active.read(io, 0, self.guest, &self.payload).await;
        }
        if self.op == Op::BlockStatus {
            // SAFETY: the request is in flight until this task has ended.
            let mut out = unsafe { Extents::of(&self.payload.segments, self.len) };
            return active.block_status(io, self.guest, &mut out).await;
        }
        let Some(tables) = active.top() else {
            // A request beyond the disk's end.
            return Err(libc::EIO);
        };
        let range = self.guest..self.guest + self.len;
        let how = match self.op {
            Op::Flush => return tables.flush(io).await,
            Op::Discard => Empty::Discard,
            _ => Empty::Zero { unmap: self.unmap },
        };
        if self.op == Op::Write && self.compress {
            let segments = &self.payload.segments;
            active.write_compressed(io, tables, segments, range).await?;
        } else if self.op == Op::Write {
            let write = Write {
                start: self.guest,
                source: Source::Guest(self.payload.segments.clone()),
            };
            let given_up = tables.given_up.load(Ordering::Acquire);
            let written = active.write(io, tables, &write, range.clone()).await;
            match (written, &mut self.counted) {
                (Err(libc::ENOSPC), Some(counted)) => {
                    counted.outside(tables.reclaim(io, given_up)).await?;
                    // The disk may have become smaller meanwhile.
                    if range.end.0 > self.shared.size() {
                        return Err(libc::EIO);
                    }
                    active.write(io, tables, &write, range).await?;
                }
                (written, _) => written?,
            }
        } else {
            active.empty(io, tables, how, range).await?;
        }
        match self.fua {
            true => tables.flush(io).await,
            false => tables.limit_dirty(io).await,
        }
    }
}
