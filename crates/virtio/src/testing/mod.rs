//! A guest for tests, benchmarks and fuzzing: memory between guard pages and the driver's side of a
//! queue.

mod driver;
pub mod fuzz;
mod fuzz_packed;
mod memory;
mod packed_driver;

pub use driver::{Buffer, Driver, NEXT, WRITE, signalled};
pub use memory::TestMemory;
pub use packed_driver::{PackedDriver, Wish};

use crate::BlkDevice;
use crate::blk_queue::DiskQueue;
use crate::ring::Ring;
use fathom_core::{
    Broken, Completion, Cx, DiskInfo, Engine, FileId, Io, RangeLimits, RequestId, Source, Token,
    Wait,
};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// An engine that does nothing; queues need none.
struct NoEngine;

impl Engine for NoEngine {
    fn name(&self) -> &'static str {
        "none"
    }

    fn reserve(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _: BorrowedFd<'_>) -> io::Result<FileId> {
        Ok(FileId(0))
    }

    fn remove_file(&mut self, _: FileId) {}

    unsafe fn push(&mut self, _: Io, _: Token) {}

    fn watch(&mut self, _: RawFd, _: Token) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _: RawFd, _: Token) {}

    fn submit(&mut self, _: Wait, _: &mut Vec<Completion>) -> io::Result<()> {
        Ok(())
    }

    fn ready(&mut self) -> bool {
        false
    }
}

/// Creates the context that a worker passes to its sources, with room for `requests`.
pub fn context(requests: usize) -> Cx {
    let mut cx = Cx::new(Box::new(NoEngine));
    cx.slab.grow(requests);
    cx
}

/// Returns a writable disk of 1 GiB that supports all operations.
pub fn disk() -> DiskInfo {
    let limits = Some(RangeLimits {
        alignment: 4096,
        max_len: 1 << 30,
    });
    DiskInfo {
        size: 1 << 30,
        block_size: 512,
        physical_block_size: 4096,
        optimal_io_size: 0,
        read_only: false,
        write_cache: true,
        discard: limits,
        write_zeroes: limits,
    }
}

/// Returns the device of `disk()`.
pub fn device() -> BlkDevice {
    BlkDevice::new(disk(), "a serial number", 1)
}

/// Pops as many requests as there is room for. Returns them and the number of requests that the
/// queue answered itself.
pub fn pop<R: Ring>(
    queue: &mut DiskQueue<R>,
    cx: &mut Cx,
) -> Result<(Vec<RequestId>, u32), Broken> {
    let mut batch = Vec::new();
    let room = queue.capacity();
    let answered = queue.pop(cx, room, &mut batch)?;
    Ok((batch, answered))
}

/// Finishes requests with `errno` and releases their slots.
pub fn finish<R: Ring>(queue: &mut DiskQueue<R>, cx: &mut Cx, batch: &[RequestId], errno: i32) {
    for &id in batch {
        cx.slab[id].error = errno;
        queue.finish(&cx.slab[id]);
        cx.slab.put(id);
    }
}
