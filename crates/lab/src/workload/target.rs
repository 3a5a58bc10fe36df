//! The file that is measured, and memory to read it into.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use super::offsets::Offsets;
use super::options::{Options, SECTOR, bad};
use crate::error::{Context, Result};

/// What every device accepts as a buffer's alignment.
const PAGE: usize = 4096;

/// An open file and the offsets to use in it.
#[derive(Debug)]
pub(super) struct Target {
    pub file: File,
    pub offsets: Offsets,
}

impl Target {
    pub fn open(options: &Options) -> Result<Target> {
        let path = &options.path;
        let mut file = open(options)?;
        let end = file
            .seek(SeekFrom::End(0))
            .context(|| format!("cannot ask for the size of {}", path.display()))?;
        let rest = end.saturating_sub(options.offset);
        let length = options.length.unwrap_or(rest);
        if length > rest {
            return options.bad(format!(
                "it has {end} bytes; {length} from {} are asked for",
                options.offset
            ));
        }
        let blocks = length / options.block_size;
        if blocks == 0 {
            return options.bad(format!(
                "the range of {length} bytes does not hold one block of {}",
                options.block_size
            ));
        }
        let seed = options.rw.is_random().then_some(options.seed);
        let offsets = Offsets::new(options.offset, blocks, options.block_size, seed);
        Ok(Target { file, offsets })
    }
}

fn open(options: &Options) -> Result<File> {
    let path = &options.path;
    let direct = if options.direct {
        // In the platform's numbering, which O_DIRECT is not the same in on all of them.
        rustix::fs::OFlags::DIRECT.bits().cast_signed()
    } else {
        0
    };
    OpenOptions::new()
        .read(true)
        .write(options.rw.is_write())
        .custom_flags(direct)
        .open(path)
        .or_else(|error| match error.raw_os_error() {
            Some(code) if options.direct && code == rustix::io::Errno::INVAL.raw_os_error() => {
                Err(bad(
                    path,
                    "its file system has no direct I/O: put it on another, or measure through \
                     the page cache"
                        .into(),
                ))
            }
            _ => Err(error).context(|| format!("cannot open {}", path.display())),
        })
}

/// Memory for the operations in flight: page-aligned, touched, filled with noise (a disk that
/// compresses or skips zeroes would be measured at something else).
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    /// Bytes from one slot to the next.
    stride: usize,
    block_size: usize,
}

impl Memory {
    pub fn new(slots: u32, block_size: u64) -> Result<Memory> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let what = || "cannot get memory for the benchmark's buffers".to_owned();
        let block_size = usize::try_from(block_size)
            .map_err(|_| no_memory())
            .context(what)?;
        let stride = block_size.next_multiple_of(PAGE);
        let bytes = stride
            .checked_mul(slots as usize)
            .ok_or_else(no_memory)
            .context(what)?;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no other.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags) }
            .context(what)?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(no_memory)
            .context(what)?;
        let memory = Memory {
            start,
            bytes,
            stride,
            block_size,
        };
        memory.fill();
        Ok(memory)
    }

    fn fill(&self) {
        let mut noise = Offsets::new(0, u64::MAX, 1, Some(1));
        for at in (0..self.bytes).step_by(8) {
            // SAFETY: `bytes` is a multiple of the page size, so eight bytes at `at` lie within
            // the mapping, aligned; nobody else uses it yet.
            unsafe {
                self.start
                    .as_ptr()
                    .add(at)
                    .cast::<u64>()
                    .write(noise.next_offset())
            };
        }
    }

    /// A slot's memory: `block_size` bytes that stay mapped as long as this is.
    ///
    /// # Panics
    /// When there is no such slot.
    #[inline]
    pub fn slot(&self, slot: u32) -> (*mut u8, usize) {
        let at = slot as usize * self.stride;
        assert!(at + self.block_size <= self.bytes, "no slot {slot}");
        // SAFETY: within the mapping, as was just checked.
        (unsafe { self.start.as_ptr().add(at) }, self.block_size)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; whoever gave its slots to the kernel has waited for the
        // kernel to be done with them (see `Flight`).
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// What an operation that failed is said to be.
pub(super) fn describe(errno: i64, options: &Options) -> String {
    let error = io::Error::from_raw_os_error(i32::try_from(-errno).unwrap_or(0));
    let einval = i64::from(rustix::io::Errno::INVAL.raw_os_error());
    let hint = if errno == -einval && options.direct && options.block_size < 4096 {
        format!("; the device's sectors may be larger than {SECTOR} bytes: try a block size of 4k")
    } else {
        String::new()
    };
    format!("every {} failed: {error}{hint}", options.rw)
}
