//! Disks that no user has.

use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Op, RangeLimits, RequestId, Stage};

/// Full of sevens, but for one bad sector.
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
