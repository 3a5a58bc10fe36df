//! A disk without data, which measures Fathom's own cost.

use crate::kind::{Kind, OfSize, Opened};
use crate::memory::volatile;
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Extents, Op, RequestId, Resize, Stage, Status,
};
use std::sync::atomic::{AtomicU64, Ordering};

const PREFIX: &str = "null:";

pub(crate) const KIND: Kind = Kind {
    name: "null",
    form: "null:SIZE",
    what: "No storage: reads return anything, and writes are dropped; measures Fathom alone",
    prefixes: &[PREFIX],
    images: false,
    network: false,
    locks: false,
    options: &[],
    parse: |text| OfSize::parse(PREFIX, text, |size, _| Ok(Opened::new(NullDisk::new(size)))),
};

/// A disk that touches no data: reads leave their buffers as they are, writes are dropped, and
/// every request completes at once.
#[derive(Debug)]
pub struct NullDisk {
    size: AtomicU64,
}

impl NullDisk {
    /// Makes a disk of `size` bytes, rounded down to a multiple of 512.
    pub fn new(size: u64) -> NullDisk {
        NullDisk {
            size: (size & !511).into(),
        }
    }
}

impl Disk for NullDisk {
    fn info(&self) -> DiskInfo {
        volatile(self.size.load(Ordering::Relaxed))
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let size = to.named(self.size.load(Ordering::Relaxed))?;
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(NullChannel))
    }
}

struct NullChannel;

impl Channel for NullChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        if request.op == Op::BlockStatus {
            // SAFETY: the request is in flight.
            unsafe { Extents::of(&request.segments, request.len) }.push(Status::DATA, request.len);
        }
        cx.complete(id, 0);
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}
