//! Maps shared memory of the front-end: guest memory, the dirty log, and the in-flight area.

use super::alarm::Alarm;
use super::backing;
use super::share::{Share, ShareError, Taken};
use fathom_sigbus::Guarded;
use fathom_units::cause;
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// File-system type of hugetlbfs in statfs(2). Mappings of hugetlbfs are multiples of its block
/// size.
const HUGETLBFS_MAGIC: i64 = 0x958458f6;

/// Why a file descriptor of the front-end cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    #[error("the region is empty")]
    Empty,
    #[error("offset {offset:#x} plus size {len:#x} overflows")]
    Overflow { offset: u64, len: u64 },
    #[error("offset {offset:#x} plus size {len:#x} is past the end of its file ({file:#x})")]
    PastEnd { offset: u64, len: u64, file: u64 },
    #[error("not memory, but a file descriptor of type {0:?}")]
    NotMemory(FileType),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(
        "its file system ({0}) may delay access to pages for ever; put guest memory into a \
         memfd, /dev/shm, huge pages, or a file on a local disk"
    )]
    MayWait(String),
    #[error("{what}: {}", cause(source))]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

/// A range of a front-end's file, mapped shared, readable and writable. The file may shrink later:
/// see [`fathom_sigbus`].
pub struct Mapping {
    /// Removed before the range is unmapped.
    guard: Option<Guarded>,
    base: NonNull<u8>,
    map_len: usize,
    /// Offset of the range in the mapping, which starts at a page.
    delta: usize,
    len: usize,
    /// The mapped file, for a successor of this process.
    file: OwnedFd,
    offset: u64,
    /// Released after everything else.
    _taken: Taken,
}

// SAFETY: a mapping is an address range without affinity to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a mapping only hands out a pointer; its users synchronise.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, and counts them against `share`.
    pub fn new(
        file: OwnedFd,
        offset: u64,
        len: u64,
        alarm: Arc<Alarm>,
        share: &Arc<Share>,
    ) -> Result<Mapping, MapError> {
        let fd = file.as_fd();
        backing::check(fd)?;
        let page_size = check_file(fd, offset, len)?;
        let delta = offset % page_size;
        let overflow = MapError::Overflow { offset, len };
        let Some(map_len) = (len + delta)
            .checked_next_multiple_of(page_size)
            .and_then(|n| usize::try_from(n).ok())
        else {
            return Err(overflow);
        };
        let taken = share.take(map_len as u64)?;
        // SAFETY: this is a new mapping at an address that the kernel chooses.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                offset - delta,
            )
        }
        .map_err(|e| MapError::Io {
            what: "cannot map the region",
            source: e.into(),
        })?;
        base.expose_provenance();
        let mut mapping = Mapping {
            guard: None,
            base: NonNull::new(base.cast()).expect("mmap does not return null"),
            map_len,
            delta: delta as usize,
            len: len as usize,
            file,
            offset,
            _taken: taken,
        };
        // Core dumps of this process must not contain the guest's memory.
        // SAFETY: the advice applies to our own range and does not change contents.
        let _ = unsafe { madvise(base, map_len, Advice::LinuxDontDump) };
        let guard = Guarded::new(base.cast(), map_len, page_size as usize, alarm).map_err(|e| {
            MapError::Io {
                what: "cannot map a guard page",
                source: e,
            }
        })?;
        mapping.guard = Some(guard);
        Ok(mapping)
    }

    /// Returns the address of the first byte; the range stays mapped while `self` exists.
    pub fn ptr(&self) -> NonNull<u8> {
        // SAFETY: `delta` lies within the mapping.
        unsafe { self.base.add(self.delta) }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the mapped file and the offset of the range.
    pub fn file(&self) -> (BorrowedFd<'_>, u64) {
        (self.file.as_fd(), self.offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: `new` mapped exactly this range, and all users of pointers into it hold `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.map_len) };
    }
}

/// Checks a file and a range before they are mapped. Returns the page size of mappings of this file
/// in bytes.
fn check_file(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, MapError> {
    if len == 0 {
        return Err(MapError::Empty);
    }
    let end = offset
        .checked_add(len)
        .filter(|end| i64::try_from(*end).is_ok())
        .ok_or(MapError::Overflow { offset, len })?;
    let stat = fstat(fd).map_err(|e| MapError::Io {
        what: "fstat failed",
        source: e.into(),
    })?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if end > stat.st_size as u64 => Err(MapError::PastEnd {
            offset,
            len,
            file: stat.st_size as u64,
        }),
        // A DAX device checks the range itself.
        FileType::RegularFile | FileType::CharacterDevice => Ok(page_size(fd)),
        other => Err(MapError::NotMemory(other)),
    }
}

fn page_size(fd: BorrowedFd<'_>) -> u64 {
    match fstatfs(fd) {
        Ok(fs) if fs.f_type == HUGETLBFS_MAGIC => fs.f_bsize as u64,
        _ => rustix::param::page_size() as u64,
    }
}
