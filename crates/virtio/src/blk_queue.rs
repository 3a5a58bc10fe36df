//! One virtqueue of a disk, as the worker's source of requests.

use crate::blk_device::{BlkDevice, SERIAL_LEN};
use crate::chain::{ChainContext, TableCopy, Unusable};
use crate::descriptor::Descriptor;
use crate::dirty_log::DirtyLog;
use crate::features::{RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::inflight::{InflightError, InflightQueue};
use crate::memory::{GuestMemory, GuestRegion, RegionCache};
use crate::queue::layout::{IDX, RING, USED_ELEMENT, used_len};
use crate::queue::{RingAddresses, RingError, SplitQueue, prefetch};
use crate::request::{Limits, Parser, Status, Verdict};
use fathom_core::peer_event::{self, Full};
use fathom_core::{Broken, Buffer, Cx, Eventfd, Op, Request, RequestId, Segments, Source, Wire};
use std::any::Any;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// All that a front-end says about one queue.
pub struct QueueSetup {
    /// The queue's number.
    pub index: u16,
    /// Entries; a power of two, at most 1024.
    pub size: u16,
    /// The descriptor table, as the front-end's own address.
    pub desc_addr: u64,
    /// The avail ring, likewise.
    pub avail_addr: u64,
    /// The used ring, likewise.
    pub used_addr: u64,
    /// The used ring's guest physical address for the dirty log, if writes
    /// to it are to be logged (VHOST_VRING_F_LOG).
    pub log_addr: Option<u64>,
    /// The avail index to go on from.
    pub base: u16,
    /// What the driver has accepted.
    pub features: u64,
    /// The eventfd that the driver signals.
    pub kick: OwnedFd,
    /// The eventfd that interrupts the driver; without one, it polls.
    pub call: Option<OwnedFd>,
    /// The eventfd that tells the front-end that the queue is broken.
    pub err: Option<OwnedFd>,
}

/// Why a queue cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error("queue {index}: {source}")]
    Ring { index: u16, source: RingError },
    #[error("queue {index}: {source}")]
    Inflight { index: u16, source: InflightError },
    #[error("queue {index}: the dirty log does not cover its used ring at {addr:#x}")]
    Log { index: u16, addr: u64 },
}

/// One virtqueue of a disk.
pub struct BlkQueue {
    ring: SplitQueue,
    cache: RegionCache,
    copy: TableCopy,
    indirect: bool,
    limits: Limits,
    inflight: Option<InflightQueue>,
    /// In-flight heads of our predecessor, the next to be submitted last.
    resubmit: Vec<u16>,
    /// What `pop` has taken and not yet parsed: heads with their first
    /// descriptors. Of no meaning between its calls.
    staged: Vec<(u16, Descriptor)>,
    /// Nothing can be told to the driver any more.
    deaf: bool,
    log: Option<Arc<DirtyLog>>,
    setup: QueueSetup,
    device: Arc<BlkDevice>,
    memory: Arc<GuestMemory>,
}

impl BlkQueue {
    /// Start a queue. If requests of a predecessor are in flight by the
    /// in-flight region, they are popped first; `setup.base` is then not
    /// needed and not looked at.
    pub fn new(
        mut setup: QueueSetup,
        memory: Arc<GuestMemory>,
        log: Option<Arc<DirtyLog>>,
        mut inflight: Option<InflightQueue>,
        device: Arc<BlkDevice>,
    ) -> Result<BlkQueue, QueueError> {
        let index = setup.index;
        check_log(&setup, log.as_deref())?;
        let at = RingAddresses {
            desc: setup.desc_addr,
            avail: setup.avail_addr,
            used: setup.used_addr,
        };
        let event_idx = setup.features & RING_F_EVENT_IDX != 0;
        // SAFETY: this queue keeps `memory`, and drops it after the ring.
        let ring = unsafe { SplitQueue::new(&memory, at, setup.size, setup.base, event_idx) };
        let mut ring = ring.map_err(|source| QueueError::Ring { index, source })?;
        let mut resubmit = Vec::new();
        if let Some(inflight) = &mut inflight {
            let recovery = inflight
                .recover(setup.size, ring.next_used())
                .map_err(|source| QueueError::Inflight { index, source })?;
            if !recovery.fresh {
                // Whatever was popped is either used or in flight.
                let popped = recovery.heads.len() as u16;
                ring.set_next_avail(ring.next_used().wrapping_add(popped));
            }
            resubmit = recovery.heads;
            resubmit.reverse();
        }
        setup.base = ring.next_avail();
        let mut queue = BlkQueue {
            cache: RegionCache::default(),
            copy: TableCopy::default(),
            indirect: setup.features & RING_F_INDIRECT_DESC != 0,
            limits: limits(&device, setup.features),
            ring,
            inflight,
            resubmit,
            staged: Vec::with_capacity(usize::from(setup.size)),
            deaf: false,
            log,
            setup,
            device,
            memory,
        };
        if queue.ring.next_used() != 0 {
            // Our predecessor may have died between publishing and calling.
            queue.notify();
        }
        Ok(queue)
    }

    /// Take a queue apart that has nothing in flight. The setup's `base` is
    /// the avail index that a successor goes on from.
    pub fn into_parts(self) -> (QueueSetup, Option<InflightQueue>) {
        let mut setup = self.setup;
        setup.base = self.ring.next_avail();
        (setup, self.inflight)
    }

    /// The avail index of the next head to be popped.
    pub fn next_avail(&self) -> u16 {
        self.ring.next_avail()
    }

    /// The next head: first our predecessor's, then the driver's.
    #[inline(always)]
    fn next_head(&mut self) -> Result<u16, RingError> {
        if let Some(head) = self.resubmit.pop() {
            return Ok(head);
        }
        let head = self.ring.pop()?;
        if let Some(inflight) = &mut self.inflight {
            inflight.mark(head);
        }
        Ok(head)
    }

    /// `pop` of the `Source`, with its errors as they are.
    #[inline(always)]
    fn pop_batch(
        &mut self,
        cx: &mut Cx,
        room: usize,
        batch: &mut Vec<RequestId>,
    ) -> Result<u32, RingError> {
        self.limits.size = self.device.size();
        self.limits.write_through = self.device.write_through(self.setup.features);
        let heads = self.resubmit.len() + usize::from(self.ring.available()?);
        let staged = self.stage(heads.min(room));
        let mut answered = 0;
        for index in 0..self.staged.len() {
            let Some(id) = cx.slab.take() else {
                self.unstage(index);
                break;
            };
            let (head, first) = self.staged[index];
            let request = &mut cx.slab[id];
            let verdict = self.parse(first, request);
            if let Ok(Verdict::Submit(status)) = verdict {
                request.queue = self.setup.index;
                request.tag = head;
                request.cookie = status.as_ptr() as u64;
                request.wire = Wire::None;
                batch.push(id);
            } else {
                cx.refused += u64::from(!matches!(verdict, Ok(Verdict::Identify(_))));
                self.answer_now(head, verdict, &request.segments);
                cx.slab.put(id);
                answered += 1;
            }
        }
        staged.map(|()| answered)
    }

    /// Take `n` heads and the first descriptor of each. Where those point is
    /// fetched meanwhile: the driver wrote it last, so it is far away.
    #[inline(always)]
    fn stage(&mut self, n: usize) -> Result<(), RingError> {
        self.staged.clear();
        for _ in 0..n {
            let head = self.next_head()?;
            let first = self.ring.first_descriptor(head);
            if let Some(host) = self.cache.translate(&self.memory, first.addr(), 16) {
                prefetch(host.as_ptr());
            }
            self.staged.push((head, first));
        }
        Ok(())
    }

    /// Leave what was staged from `index` on for the next `pop`. (The worker
    /// has a slot for each request that it has room for, so this is not to
    /// happen.)
    #[cold]
    fn unstage(&mut self, index: usize) {
        let rest = self.staged.drain(index..).rev();
        self.resubmit.extend(rest.map(|(head, _)| head));
    }

    #[inline(always)]
    fn parse(&mut self, first: Descriptor, request: &mut Request) -> Result<Verdict, Unusable> {
        let chains = ChainContext {
            queue: &self.ring,
            memory: &self.memory,
            cache: &mut self.cache,
            copy: &mut self.copy,
            indirect: self.indirect,
        };
        let limits = &self.limits;
        Parser { chains, limits }.parse(first, request)
    }

    /// Answer what does not reach the disk.
    #[cold]
    fn answer_now(&mut self, head: u16, verdict: Result<Verdict, Unusable>, segments: &Segments) {
        let (status, code, written) = match verdict {
            Err(Unusable) => return self.answer(head, 0),
            Ok(Verdict::Submit(status)) => (status, Status::IoErr, 0),
            Ok(Verdict::Refuse(status, code)) => (status, code, 0),
            Ok(Verdict::Identify(status)) => (status, Status::Ok, self.identify(segments)),
        };
        self.write_status(status, code);
        self.answer(head, written + 1);
    }

    /// Write the serial number to `segments`, as far as it fits. Returns the
    /// number of bytes.
    fn identify(&self, segments: &Segments) -> u32 {
        let serial = self.device.serial();
        let mut done = 0;
        for piece in segments {
            let len = piece.iov_len.min(SERIAL_LEN - done);
            for (i, byte) in serial[done..done + len].iter().enumerate() {
                // SAFETY: segments name mapped guest memory.
                unsafe { piece.iov_base.cast::<u8>().add(i).write_volatile(*byte) };
            }
            self.log_host(piece.iov_base.cast(), len as u64);
            done += len;
        }
        done as u32
    }

    #[inline(always)]
    fn write_status(&self, at: NonNull<u8>, status: Status) {
        // SAFETY: an address that the parser translated in `self.memory`.
        unsafe { at.write_volatile(status as u8) };
        if self.log.is_some() {
            self.log_host(at.as_ptr(), 1);
        }
    }

    /// Write a used element.
    #[inline(always)]
    fn answer(&mut self, head: u16, written: u32) {
        if self.ring.unpublished() == self.ring.size() {
            // Only a driver that makes a head available twice gets here.
            self.publish_used();
        }
        self.ring.push_used(head, written);
        if let Some(inflight) = &mut self.inflight {
            inflight.link(head);
        }
    }

    #[inline(always)]
    fn publish_used(&mut self) {
        let new = self.ring.unpublished();
        self.ring.publish();
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.ring.next_used());
        }
        if self.log.is_some() {
            self.log_used(new);
        }
    }

    /// Log the last `new` used elements, and the index.
    #[cold]
    fn log_used(&self, new: u16) {
        let (Some(log), Some(used)) = (&self.log, self.setup.log_addr) else {
            return;
        };
        let (size, end) = (self.ring.size(), self.ring.next_used());
        for index in (1..=new).map(|back| end.wrapping_sub(back) & (size - 1)) {
            let offset = RING + USED_ELEMENT * usize::from(index);
            log.mark(used + offset as u64, USED_ELEMENT as u64);
        }
        log.mark(used + IDX as u64, 2);
    }

    /// Log a change of what tells the driver whether to kick.
    fn log_kick_wishes(&self) {
        if let (Some(log), Some(used)) = (&self.log, self.setup.log_addr) {
            log.mark(used, 2);
            log.mark(used + used_len(self.ring.size()) - 2, 2);
        }
    }

    #[cold]
    fn log_host(&self, host: *const u8, len: u64) {
        if let (Some(log), Some(gpa)) = (&self.log, self.memory.gpa_of(host)) {
            log.mark(gpa, len);
        }
    }

    #[cold]
    fn broken(&self, why: String) -> Broken {
        // There is no other way to tell the front-end.
        let _ = signal(self.setup.err.as_ref());
        Broken(format!("queue {}: {why}", self.setup.index))
    }
}

impl Source for BlkQueue {
    fn capacity(&self) -> usize {
        usize::from(self.ring.size())
    }

    fn queue(&self) -> Option<u16> {
        Some(self.setup.index)
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.setup.kick.as_raw_fd())
    }

    fn set_eventfd(&mut self, which: Eventfd, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        match which {
            Eventfd::Kick => fd.map(|fd| std::mem::replace(&mut self.setup.kick, fd)),
            Eventfd::Call => {
                let previous = std::mem::replace(&mut self.setup.call, fd);
                self.deaf = false;
                self.notify();
                previous
            }
            Eventfd::Err => std::mem::replace(&mut self.setup.err, fd),
        }
    }

    fn memory(&self) -> Vec<Buffer> {
        self.memory
            .regions()
            .iter()
            .map(GuestRegion::buffer)
            .collect()
    }

    fn inherited(&self) -> usize {
        self.resubmit.len()
    }

    #[inline]
    fn pending(&mut self) -> bool {
        self.ring.pending() || !self.resubmit.is_empty()
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        if self.memory.is_poisoned() {
            return Err(self.broken("the front-end has truncated its memory".to_owned()));
        }
        if self.deaf {
            return Err(self.broken(format!("its call eventfd: {Full}")));
        }
        self.pop_batch(cx, room, batch)
            .map_err(|error| self.broken(error.to_string()))
    }

    #[inline]
    fn finish(&mut self, request: &Request) {
        let status = Status::from_errno(request.error);
        let mut written = 1;
        if request.op == Op::Read {
            if status == Status::Ok {
                written += request.len as u32;
            }
            if self.log.is_some() {
                // Even a failed read may have written.
                for piece in &request.segments {
                    self.log_host(piece.iov_base.cast(), piece.iov_len as u64);
                }
            }
        }
        if let Some(at) = NonNull::new(request.cookie as *mut u8) {
            self.write_status(at, status);
        }
        self.answer(request.tag, written);
    }

    #[inline]
    fn publish(&mut self, _: &mut Cx) -> bool {
        self.publish_used();
        self.ring.needs_call()
    }

    fn notify(&mut self) {
        self.deaf |= signal(self.setup.call.as_ref()).is_err();
    }

    fn arm(&mut self) -> bool {
        let work = self.ring.enable_kicks();
        self.log_kick_wishes();
        work || !self.resubmit.is_empty()
    }

    fn disarm(&mut self) {
        self.ring.disable_kicks();
        self.log_kick_wishes();
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

fn limits(device: &BlkDevice, features: u64) -> Limits {
    let info = device.info();
    Limits {
        size: device.size(),
        read_only: info.read_only,
        write_through: device.write_through(features),
        discard: info.discard,
        write_zeroes: info.write_zeroes,
    }
}

/// The used ring's bits lie within the log (vhost-user, "Migration").
fn check_log(setup: &QueueSetup, log: Option<&DirtyLog>) -> Result<(), QueueError> {
    let (Some(log), Some(addr)) = (log, setup.log_addr) else {
        return Ok(());
    };
    let index = setup.index;
    match addr.checked_add(used_len(setup.size)) {
        Some(end) if log.covers(end) => Ok(()),
        _ => Err(QueueError::Log { index, addr }),
    }
}

/// Signal an eventfd, if there is one.
pub fn signal(event: Option<&OwnedFd>) -> Result<(), Full> {
    event.map_or(Ok(()), |event| peer_event::signal(event.as_fd()))
}
