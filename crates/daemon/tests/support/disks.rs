//! Disks that no user has.

use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Op, RangeLimits, RequestId, Stage};
use parking_lot::Mutex;
use std::sync::Arc;

/// A request to a disk: the operation, whether it must be durable, and whether it may leave a hole.
pub type Asked = (Op, bool, bool);

/// A disk that only records its requests.
pub struct NotingDisk {
    write_cache: bool,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl NotingDisk {
    pub fn new(write_cache: bool) -> Arc<NotingDisk> {
        Arc::new(NotingDisk {
            write_cache,
            asked: Arc::default(),
        })
    }

    /// Returns the requests since the last call.
    pub fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut self.asked.lock())
    }
}

impl Disk for NotingDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            write_cache: self.write_cache,
            ..FailingDisk { bad: 0 }.info()
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(NotingChannel(self.asked.clone())))
    }
}

struct NotingChannel(Arc<Mutex<Vec<Asked>>>);

impl Channel for NotingChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        let mut asked = self.0.lock();
        asked.push((request.op, request.fua, request.unmap));
        drop(asked);
        cx.complete(id, 0);
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}

/// A disk full of sevens, except one bad sector.
pub struct FailingDisk {
    pub bad: u64,
}

impl Disk for FailingDisk {
    fn info(&self) -> DiskInfo {
        let limits = Some(RangeLimits {
            alignment: 512,
            max_len: 1 << 20,
        });
        DiskInfo {
            size: 64 << 20,
            block_size: 512,
            physical_block_size: 512,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard: limits,
            write_zeroes: limits,
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(FailingChannel(self.bad)))
    }
}

struct FailingChannel(u64);

impl Channel for FailingChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        assert!(request.op == Op::Read || request.op == Op::Write || request.len <= 1 << 20);
        let range = request.offset..request.offset + request.len;
        if request.op == Op::Read {
            for segment in &request.segments {
                // SAFETY: the source vouches for its segments.
                unsafe {
                    segment
                        .iov_base
                        .cast::<u8>()
                        .write_bytes(7, segment.iov_len)
                };
            }
        }
        let failed = range.contains(&self.0);
        cx.complete(id, if failed { libc::EIO } else { 0 });
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}
