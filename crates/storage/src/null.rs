//! A disk of nothing: what Fathom costs by itself.

use crate::memory::volatile;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RequestId, Stage};

/// A disk that touches no data: reads leave their buffers as they are,
/// writes go nowhere, everything completes at once.
#[derive(Debug)]
pub struct NullDisk {
    size: u64,
}

impl NullDisk {
    /// `size` in bytes; what exceeds a multiple of 512 is not shown.
    pub fn new(size: u64) -> NullDisk {
        NullDisk { size: size & !511 }
    }
}

impl Disk for NullDisk {
    fn info(&self) -> DiskInfo {
        volatile(self.size)
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
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
        cx.complete(id, 0);
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}
