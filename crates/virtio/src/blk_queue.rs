//! A virtqueue of a disk, as a worker's source of requests.

use crate::blk_device::{BlkDevice, SERIAL_LEN};
use crate::chain::{ChainContext, TableCopy, Unusable};
use crate::descriptor::Descriptor;
use crate::dirty_log::DirtyLog;
use crate::features::{RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::inflight::InflightError;
use crate::memory::{GuestMemory, GuestRegion, RegionCache};
use crate::packed::PackedQueue;
use crate::queue::{SplitQueue, prefetch};
use crate::request::{Limits, Parser, Status, Verdict};
use crate::ring::{Ring, RingAddresses, RingError, RingSetup, StartError, Started};
use fathom_core::peer_event::{self, Full};
use fathom_core::{Broken, Buffer, Cx, Eventfd, Op, Request, RequestId, Segments, Source, Wire};
use std::any::Any;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Configuration of one queue by the front-end.
pub struct QueueSetup {
    /// Number of the queue.
    pub index: u16,
    /// Number of entries, at most 1024. Split queues need a power of two.
    pub size: u16,
    /// Address of the descriptor table or ring in the front-end's address space.
    pub desc_addr: u64,
    /// Address of the avail ring, or of the driver's event suppression, in the front-end's address
    /// space.
    pub avail_addr: u64,
    /// Address of the used ring, or of the device's event suppression, in the front-end's address
    /// space.
    pub used_addr: u64,
    /// Guest physical address of the used ring for the dirty log, if writes to the ring are logged
    /// (VHOST_VRING_F_LOG).
    pub log_addr: Option<u64>,
    /// Position at which the queue starts, as in SET_VRING_BASE: the avail index of a split queue,
    /// or the avail and used positions of a packed queue ([`INITIAL_PACKED_BASE`] for a new one).
    ///
    /// [`INITIAL_PACKED_BASE`]: crate::packed::INITIAL_BASE
    pub base: u32,
    /// Features that the driver has accepted.
    pub features: u64,
    /// Eventfd that the driver signals.
    pub kick: OwnedFd,
    /// Eventfd that interrupts the driver. Without it, the driver polls.
    pub call: Option<OwnedFd>,
    /// Eventfd that informs the front-end that the queue is broken.
    pub err: Option<OwnedFd>,
}

/// Reason why a queue cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The rings of the queue are invalid.
    #[error("queue {index}: {source}")]
    Ring {
        /// Number of the queue.
        index: u16,
        /// Problem of the rings.
        source: RingError,
    },
    /// The in-flight region does not fit the queue.
    #[error("queue {index}: {source}")]
    Inflight {
        /// Number of the queue.
        index: u16,
        /// Problem of the in-flight region.
        source: InflightError,
    },
    /// The dirty log does not cover the used ring.
    #[error("queue {index}: the dirty log does not cover its used ring at {addr:#x}")]
    Log {
        /// Number of the queue.
        index: u16,
        /// Guest physical address of the used ring.
        addr: u64,
    },
}

/// A split virtqueue of a disk.
pub type BlkQueue = DiskQueue<SplitQueue>;

/// A packed virtqueue of a disk.
pub type PackedBlkQueue = DiskQueue<PackedQueue>;

/// A virtqueue of a disk, with a ring of layout `R`.
pub struct DiskQueue<R: Ring> {
    ring: R,
    cache: RegionCache,
    copy: TableCopy,
    indirect: bool,
    limits: Limits,
    inflight: Option<R::Region>,
    /// Chains that the predecessor left in flight; the next to be submitted is at the end.
    resubmit: Vec<R::Chain>,
    /// Chains that `pop` has taken and not parsed yet, with their first descriptors. Unused between
    /// calls of `pop`.
    staged: Vec<(R::Chain, Descriptor)>,
    /// The call eventfd was full, so the driver cannot be notified any more.
    deaf: bool,
    log: Option<Arc<DirtyLog>>,
    setup: QueueSetup,
    device: Arc<BlkDevice>,
    memory: Arc<GuestMemory>,
}

impl<R: Ring> DiskQueue<R> {
    /// Starts a queue. If the in-flight region contains requests of a predecessor, they are popped
    /// first. If the region was in use before, it determines the avail index instead of
    /// `setup.base`.
    pub fn new(
        mut setup: QueueSetup,
        memory: Arc<GuestMemory>,
        log: Option<Arc<DirtyLog>>,
        mut inflight: Option<R::Region>,
        device: Arc<BlkDevice>,
    ) -> Result<DiskQueue<R>, QueueError> {
        let index = setup.index;
        check_log::<R>(&setup, log.as_deref())?;
        let at = RingAddresses {
            desc: setup.desc_addr,
            avail: setup.avail_addr,
            used: setup.used_addr,
        };
        let ring = RingSetup {
            at,
            size: setup.size,
            base: setup.base,
            event_idx: setup.features & RING_F_EVENT_IDX != 0,
        };
        // SAFETY: this queue keeps `memory`, and drops it after the ring.
        let started = unsafe { R::start(&memory, &ring, &mut inflight) };
        let Started {
            ring,
            mut resubmit,
            has_predecessor,
        } = started.map_err(|error| match error {
            StartError::Ring(source) => QueueError::Ring { index, source },
            StartError::Inflight(source) => QueueError::Inflight { index, source },
        })?;
        resubmit.reverse();
        if let Some(log) = &log {
            ring.log_start(log);
        }
        setup.base = ring.base();
        let mut queue = DiskQueue {
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
        if has_predecessor {
            // The predecessor may have ended between publishing and signalling.
            queue.notify();
        }
        Ok(queue)
    }

    /// Takes apart a queue that has nothing in flight. The setup's `base` is the position at which
    /// a successor continues.
    pub fn into_parts(self) -> (QueueSetup, Option<R::Region>) {
        let mut setup = self.setup;
        setup.base = self.ring.base();
        (setup, self.inflight)
    }

    /// Returns the position of the ring, as in GET_VRING_BASE.
    pub fn base(&self) -> u32 {
        self.ring.base()
    }

    /// Returns the next chain: first those of the predecessor, then those of the driver.
    #[inline(always)]
    fn next_chain(&mut self) -> Result<Option<R::Chain>, RingError> {
        if let Some(chain) = self.resubmit.pop() {
            return Ok(Some(chain));
        }
        self.ring.take(&mut self.inflight)
    }

    /// Implements `Source::pop`, with ring errors unconverted.
    #[inline(always)]
    fn pop_batch(
        &mut self,
        cx: &mut Cx,
        room: usize,
        batch: &mut Vec<RequestId>,
    ) -> Result<u32, RingError> {
        self.limits.size = self.device.size();
        self.limits.write_through = self.device.write_through(self.setup.features);
        let chains = self.resubmit.len() + self.ring.available()?;
        let staged = self.stage(chains.min(room));
        let mut answered = 0;
        for index in 0..self.staged.len() {
            let Some(id) = cx.slab.take() else {
                self.unstage(index);
                break;
            };
            let (chain, first) = self.staged[index];
            let tag = R::tag(chain);
            let request = &mut cx.slab[id];
            let verdict = self.parse(first, request);
            if let Ok(Verdict::Submit(status)) = verdict {
                request.queue = self.setup.index;
                request.tag = tag;
                request.cookie = status.as_ptr() as u64;
                request.wire = Wire::None;
                batch.push(id);
            } else {
                cx.refused += u64::from(!matches!(verdict, Ok(Verdict::Identify(_))));
                self.answer_now(tag, verdict, &request.segments);
                cx.slab.put(id);
                answered += 1;
            }
        }
        staged.map(|()| answered)
    }

    /// Takes up to `n` chains and the first descriptor of each. Prefetches the memory to which the
    /// descriptors refer, since the driver wrote it last and it is in another CPU's cache.
    #[inline(always)]
    fn stage(&mut self, n: usize) -> Result<(), RingError> {
        self.staged.clear();
        for _ in 0..n {
            let Some(chain) = self.next_chain()? else {
                break;
            };
            let first = self.ring.first_descriptor(chain);
            if let Some(host) = self.cache.translate(&self.memory, first.addr(), 16) {
                prefetch(host.as_ptr());
            }
            self.staged.push((chain, first));
        }
        Ok(())
    }

    /// Leaves the chains staged from `index` on for the next `pop`. This should not happen, because
    /// the worker has a slot for each request for which it has room.
    #[cold]
    fn unstage(&mut self, index: usize) {
        let rest = self.staged.drain(index..).rev();
        self.resubmit.extend(rest.map(|(chain, _)| chain));
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

    /// Answers a chain that does not reach the disk.
    #[cold]
    fn answer_now(&mut self, tag: u16, verdict: Result<Verdict, Unusable>, segments: &Segments) {
        let (status, code, written) = match verdict {
            Err(Unusable) => return self.answer(tag, 0),
            Ok(Verdict::Submit(status)) => (status, Status::IoErr, 0),
            Ok(Verdict::Refuse(status, code)) => (status, code, 0),
            Ok(Verdict::Identify(status)) => (status, Status::Ok, self.identify(segments)),
        };
        self.write_status(status, code);
        self.answer(tag, written + 1);
    }

    /// Writes the serial number to `segments`, as far as it fits. Returns the number of bytes.
    fn identify(&self, segments: &Segments) -> u32 {
        let serial = self.device.serial();
        let mut done = 0;
        for piece in segments {
            let len = piece.iov_len.min(SERIAL_LEN - done);
            for (i, byte) in serial[done..done + len].iter().enumerate() {
                // SAFETY: segments refer to mapped guest memory.
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

    /// Writes a used element.
    #[inline(always)]
    fn answer(&mut self, tag: u16, written: u32) {
        if self.ring.unpublished() == self.ring.size() {
            // Happens only if a driver makes a head available twice.
            self.publish_used();
        }
        self.ring.push_used(tag, written, &mut self.inflight);
    }

    #[inline(always)]
    fn publish_used(&mut self) {
        let new = self.ring.unpublished();
        self.ring.publish(&mut self.inflight);
        if self.log.is_some() {
            self.log_used(new);
        }
    }

    /// Logs the last `new` used entries.
    #[cold]
    fn log_used(&self, new: u16) {
        if let (Some(log), Some(addr)) = (&self.log, self.setup.log_addr) {
            self.ring.log_used(log, addr, new);
        }
    }

    /// Logs the fields that tell the driver whether to kick.
    fn log_kick_wishes(&self) {
        if let (Some(log), Some(addr)) = (&self.log, self.setup.log_addr) {
            self.ring.log_kick_wishes(log, addr);
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
        // An error of the signal is ignored; there is no other way to inform the front-end.
        let _ = signal(self.setup.err.as_ref());
        Broken(format!("queue {}: {why}", self.setup.index))
    }
}

// These functions are not generic. Therefore the code of both queues is generated in this crate, in
// one unit, and not in the crate that starts them.

impl BlkQueue {
    /// Returns the queue for a worker.
    #[inline(never)]
    pub fn into_source(self) -> Box<dyn Source> {
        Box::new(self)
    }
}

impl PackedBlkQueue {
    /// Returns the queue for a worker.
    #[inline(never)]
    pub fn into_source(self) -> Box<dyn Source> {
        Box::new(self)
    }
}

impl<R: Ring> Source for DiskQueue<R> {
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
                // Even a failed read may have written data.
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

/// Checks that the log covers the part at the logged address (vhost-user, "Migration").
fn check_log<R: Ring>(setup: &QueueSetup, log: Option<&DirtyLog>) -> Result<(), QueueError> {
    let (Some(log), Some(addr)) = (log, setup.log_addr) else {
        return Ok(());
    };
    let index = setup.index;
    match addr.checked_add(R::logged_len(setup.size)) {
        Some(end) if log.covers(end) => Ok(()),
        _ => Err(QueueError::Log { index, addr }),
    }
}

/// Signals an eventfd, if there is one.
pub fn signal(event: Option<&OwnedFd>) -> Result<(), Full> {
    event.map_or(Ok(()), |event| peer_event::signal(event.as_fd()))
}
