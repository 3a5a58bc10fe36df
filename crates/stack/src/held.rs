//! A disk whose users wait until it is available.

use crate::missing::Missing;
use fathom_core::{
    Channel, ChannelLayer, Cx, Disk, DiskError, DiskLayer, EventNotifier, Extents, Op, Request,
    RequestId, Status, Token, WorkerHandle,
};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A disk whose requests wait in their queues until its latch is opened; none is lost.
///
/// Afterwards only requests for missing blocks wait.
pub struct Held {
    disk: Arc<dyn Disk>,
    is_open: Arc<AtomicBool>,
    missing: Arc<Missing>,
}

impl Held {
    pub fn new(disk: Arc<dyn Disk>) -> Held {
        Held {
            disk,
            is_open: Arc::default(),
            missing: Arc::default(),
        }
    }

    pub fn missing(&self) -> Arc<Missing> {
        self.missing.clone()
    }

    pub fn latch(&self) -> Latch {
        Latch(self.is_open.clone())
    }
}

/// Opens a disk whose requests are held.
#[derive(Clone, Debug)]
pub struct Latch(Arc<AtomicBool>);

impl Latch {
    /// Opens the disk for good. A stuck worker follows as soon as it responds again.
    pub fn open(&self, workers: &[WorkerHandle]) {
        self.0.store(true, Ordering::SeqCst);
        let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
        for look in looks {
            let _ = look.wait();
        }
    }
}

impl DiskLayer for Held {
    fn below(&self) -> &dyn Disk {
        &*self.disk
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = self.disk.channel(cx)?;
        if !self.is_open.load(Ordering::SeqCst) {
            cx.close();
        }
        let failed = |source| DiskError::Io {
            path: PathBuf::from("a disk that is being copied here"),
            what: "cannot wait for its data",
            source,
        };
        let notifier = self.missing.listen().map_err(failed)?;
        let tag = cx.new_tag();
        let token = Token::channel(tag);
        cx.engine
            .watch(notifier.as_raw_fd(), token)
            .map_err(failed)?;
        Ok(Box::new(HeldChannel {
            channel,
            is_open: self.is_open.clone(),
            missing: self.missing.clone(),
            forgotten: self.missing.forgotten(),
            waiting: Vec::new(),
            notifier,
            tag,
        }))
    }
}

struct HeldChannel {
    channel: Box<dyn Channel>,
    is_open: Arc<AtomicBool>,
    missing: Arc<Missing>,
    /// Requests that wait for missing blocks.
    waiting: Vec<RequestId>,
    /// The value of [`Missing::forgotten`] when all waiting requests were last registered.
    forgotten: u64,
    /// Eventfd that is signalled when blocks have arrived.
    notifier: Arc<EventNotifier>,
    /// Tag of wake-ups by the notifier.
    tag: u16,
}

impl HeldChannel {
    fn is_let(&self, request: &Request) -> bool {
        self.missing.lets(request.op, request.offset, request.len)
    }

    #[cold]
    fn wait(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        if request.op == Op::BlockStatus {
            // The missing blocks are not known to be holes, so they are reported as data.
            // SAFETY: the request is in flight.
            let mut out = unsafe { Extents::of(&request.segments, request.len) };
            out.push(Status::DATA, request.len);
            return cx.complete(id, 0);
        }
        self.waiting.push(id);
        self.missing.want(request.op, request.offset, request.len);
        // The blocks may have arrived meanwhile, or the request may not be allowed to wait.
        self.notifier.notify();
    }

    /// Submits the waiting requests whose blocks are present now.
    fn go_on(&mut self, cx: &mut Cx) {
        let forgotten = self.missing.forgotten();
        let is_forgotten = std::mem::replace(&mut self.forgotten, forgotten) != forgotten;
        for id in std::mem::take(&mut self.waiting) {
            let request = &cx.slab[id];
            if self.is_let(request) {
                self.channel.submit(cx, id);
            } else if self.missing.is_hopeless() && !cx.may_wait(id) {
                cx.complete(id, libc::EIO);
            } else {
                if is_forgotten {
                    self.missing.want(request.op, request.offset, request.len);
                }
                self.waiting.push(id);
            }
        }
    }
}

impl ChannelLayer for HeldChannel {
    #[inline]
    fn below(&mut self) -> &mut dyn Channel {
        &mut *self.channel
    }

    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        match self.is_let(&cx.slab[id]) {
            true => self.channel.submit(cx, id),
            false => self.wait(cx, id),
        }
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        if id == RequestId::NOBODY && tag == self.tag {
            return self.go_on(cx);
        }
        self.channel.complete(cx, id, tag, result);
    }

    /// Runs after each look of the worker; keeps the worker closed.
    fn timer(&mut self, cx: &mut Cx) {
        self.channel.timer(cx);
        if !self.is_open.load(Ordering::SeqCst) {
            cx.close();
        }
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.channel.drain(cx, source);
        self.go_on(cx);
    }
}
