//! A disk whose users wait until it may be used.

use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Keepsake, Request, RequestId, Resize, SizeWatch,
    WorkerHandle,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Until it is opened, workers pop no requests of it: they stay where they come from, and none is lost.
pub struct Held {
    disk: Arc<dyn Disk>,
    is_open: Arc<AtomicBool>,
}

impl Held {
    pub fn new(disk: Arc<dyn Disk>) -> Held {
        Held {
            disk,
            is_open: Arc::default(),
        }
    }

    pub fn latch(&self) -> Latch {
        Latch(self.is_open.clone())
    }
}

/// Opens a disk that is held.
#[derive(Clone, Debug)]
pub struct Latch(Arc<AtomicBool>);

impl Latch {
    /// For good. A worker that is stuck goes on when it is no longer.
    pub fn open(&self, workers: &[WorkerHandle]) {
        self.0.store(true, Ordering::SeqCst);
        let looks: Vec<_> = workers.iter().map(WorkerHandle::begin_look).collect();
        for look in looks {
            let _ = look.wait();
        }
    }
}

impl Disk for Held {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn keepsake_len(&self) -> u64 {
        self.disk.keepsake_len()
    }

    fn keep(&self, keepsake: Option<Keepsake>) {
        self.disk.keep(keepsake);
    }

    fn connect_delay(&self) -> Duration {
        self.disk.connect_delay()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.disk.activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.disk.deactivate()
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        self.disk.resize(to)
    }

    fn watch_size(&self, watch: SizeWatch) {
        self.disk.watch_size(watch);
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = self.disk.channel(cx)?;
        if !self.is_open.load(Ordering::SeqCst) {
            cx.close();
        }
        Ok(Box::new(HeldChannel {
            channel,
            is_open: self.is_open.clone(),
        }))
    }
}

struct HeldChannel {
    channel: Box<dyn Channel>,
    is_open: Arc<AtomicBool>,
}

impl Channel for HeldChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        self.channel.submit(cx, id);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.channel.complete(cx, id, tag, result);
    }

    /// Every look of the worker comes here: it stays closed.
    fn timer(&mut self, cx: &mut Cx) {
        self.channel.timer(cx);
        if !self.is_open.load(Ordering::SeqCst) {
            cx.close();
        }
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.channel.drain(cx, source);
    }

    fn answered(&mut self, request: &Request) {
        self.channel.answered(request);
    }
}
