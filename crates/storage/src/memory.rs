//! A disk in this process's memory.

mod pages;

use crate::kind::{Kind, OfSize, Opened};
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Extents, Op, RangeLimits, Request, RequestId, Stage,
    Status,
};
use pages::{PAGE, Pages};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

const PREFIX: &str = "memory:";

pub(crate) const KIND: Kind = Kind {
    name: "memory",
    form: "memory:SIZE",
    what: "Zeroes in memory, which can be written and are gone with the server",
    prefixes: &[PREFIX],
    options: &[],
    parse: |text| OfSize::parse(PREFIX, text, |size| Ok(Opened::new(MemoryDisk::new(size)?))),
};

/// For storage to which no range is too long.
const ANY_RANGE: RangeLimits = RangeLimits {
    alignment: 4096,
    max_len: 1 << 40,
};

/// A disk of `size` bytes that is no file: nothing outlives the process.
pub(crate) fn volatile(size: u64) -> DiskInfo {
    DiskInfo {
        size,
        block_size: 512,
        physical_block_size: 4096,
        optimal_io_size: 0,
        read_only: false,
        write_cache: false,
        discard: Some(ANY_RANGE),
        write_zeroes: Some(ANY_RANGE),
    }
}

/// The most that one answer describes, so that it does not hold up others.
const MAX_STATUS: u64 = 128 << 20;

/// A disk that is gone with the process. Memory is taken when it is first
/// written and given back by discards.
pub struct MemoryDisk {
    map: Arc<Map>,
}

impl MemoryDisk {
    /// `size` in bytes; what exceeds a multiple of 512 is not shown. Fails
    /// when there is no address space for it.
    pub fn new(size: u64) -> Result<MemoryDisk, DiskError> {
        let size = size & !511;
        let name = || PathBuf::from(format!("memory:{size}"));
        if size == 0 {
            return Err(DiskError::Unusable {
                path: name(),
                problem: "a disk needs 512 bytes at least".into(),
            });
        }
        let map = Map::new(size).map_err(|source| DiskError::Io {
            path: name(),
            what: "cannot map so much memory",
            source,
        })?;
        Ok(MemoryDisk { map: Arc::new(map) })
    }
}

impl Disk for MemoryDisk {
    fn info(&self) -> DiskInfo {
        volatile(self.map.len)
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(MemoryChannel {
            map: self.map.clone(),
        }))
    }
}

struct MemoryChannel {
    map: Arc<Map>,
}

impl Channel for MemoryChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let done = self.map.serve(&cx.slab[id]);
        // The next request of the batch starts at this tick, too.
        cx.tick();
        cx.complete(id, done.err().unwrap_or(0));
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {
        unreachable!("it pushes no I/O");
    }
}

/// Zeroed private memory.
struct Map {
    base: *mut u8,
    len: u64,
    /// Where the kernel says which pages there are, if it does.
    pages: Option<Pages>,
}

// SAFETY: the mapping lives as long as the value, and its bytes are a disk's
// sectors: read and written through raw pointers only, never borrowed. Guests
// that race on a sector get what such guests get from a disk.
unsafe impl Send for Map {}
// SAFETY: as for Send.
unsafe impl Sync for Map {}

impl Map {
    fn new(len: u64) -> std::io::Result<Map> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Map {
            base: base.cast(),
            len,
            pages: Pages::open(),
        })
    }

    /// The request's range in memory, or EIO when it is not of this disk.
    #[inline]
    fn range(&self, offset: u64, len: u64) -> Result<*mut u8, i32> {
        match offset.checked_add(len) {
            // SAFETY: `offset` lies within the mapping or at its end.
            Some(end) if end <= self.len => Ok(unsafe { self.base.add(offset as usize) }),
            _ => Err(libc::EIO),
        }
    }

    #[inline]
    fn serve(&self, request: &Request) -> Result<(), i32> {
        match request.op {
            Op::Read | Op::Write => self.copy(request),
            Op::Flush => Ok(()),
            Op::Discard | Op::WriteZeroes => self.zero(request.at, request.len),
            Op::BlockStatus => self.block_status(request),
        }
    }

    /// Pages that nobody has written to are holes.
    #[cold]
    fn block_status(&self, request: &Request) -> Result<(), i32> {
        let first = self.range(request.at, request.len)?.addr() as u64;
        // SAFETY: the request is in flight.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let end = first + request.len.min(MAX_STATUS);
        let pages = first & !(PAGE - 1)..end.next_multiple_of(PAGE);
        let known = self.pages.as_ref().map(|map| {
            map.look(pages, |has_data, range| {
                let status = match has_data {
                    true => Status::DATA,
                    false => Status::HOLE,
                };
                out.push(status, range.end - range.start.max(first))
            })
        });
        if known.is_none_or(|known| known.is_err()) && out.left() == request.len {
            out.push(Status::DATA, request.len);
        }
        Ok(())
    }

    #[inline]
    fn copy(&self, request: &Request) -> Result<(), i32> {
        let mut at = self.range(request.at, request.len)?;
        let mut left = request.len as usize;
        for segment in &request.segments {
            let (buffer, len) = (segment.iov_base.cast::<u8>(), segment.iov_len);
            left = left.checked_sub(len).ok_or(libc::EINVAL)?;
            // SAFETY: the source vouches for its segments; `at` with the rest
            // of the range behind it lies in the mapping, which no guest
            // memory overlaps.
            unsafe {
                match request.op {
                    Op::Read => std::ptr::copy_nonoverlapping(at, buffer, len),
                    _ => std::ptr::copy_nonoverlapping(buffer, at, len),
                }
                at = at.add(len);
            }
        }
        Ok(())
    }

    /// Give whole pages back and clear the edges.
    fn zero(&self, offset: u64, len: u64) -> Result<(), i32> {
        let start = self.range(offset, len)?;
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(PAGE), end & !(PAGE - 1));
        // SAFETY: all pieces lie in the range that was just checked.
        unsafe {
            if first >= last {
                start.write_bytes(0, len as usize);
                return Ok(());
            }
            start.write_bytes(0, (first - offset) as usize);
            let pages = self.base.add(first as usize).cast::<c_void>();
            let advised = madvise(pages, (last - first) as usize, Advice::LinuxDontNeed);
            self.base
                .add(last as usize)
                .write_bytes(0, (end - last) as usize);
            advised.map_err(|error| error.raw_os_error())
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody uses it now.
        let unmapped = unsafe { munmap(self.base.cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}
