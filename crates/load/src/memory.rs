//! Memory shared with the server, as a guest's memory is.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// The granule of the vhost dirty log, whatever the host's page size.
pub const PAGE: usize = 4096;
/// Regions are whole huge pages, because some servers map them so.
const REGION_ALIGN: usize = 2 << 20;

/// A mapping that lives until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory without thread affinity; all access goes
// through raw pointers whose users state who may touch what.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private zeroed memory.
    pub fn anonymous(len: usize) -> Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) };
        Self::from_result(base, len, "allocating memory")
    }

    /// The first `len` bytes of `file`, shared; `len` must not pass its end.
    pub fn shared(file: BorrowedFd<'_>, len: usize, populate: bool) -> Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED;
        flags.set(MapFlags::POPULATE, populate);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, flags, file, 0) };
        Self::from_result(base, len, "mapping shared memory")
    }

    fn from_result(
        base: rustix::io::Result<*mut core::ffi::c_void>,
        len: usize,
        what: &str,
    ) -> Result<Mapping> {
        let base = base.map_err(|e| Error::os(what, e))?;
        let base = NonNull::new(base.cast()).ok_or(Error::Aborted)?;
        Ok(Mapping { base, len })
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Address of byte `offset`.
    ///
    /// # Panics
    /// When `offset..offset + len` is not inside: layouts are computed once,
    /// before any load runs.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and its users are gone with it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// One memory region of the pretended guest: memfd, mapping, guest address.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    map: Mapping,
}

/// Guest-physical address of the region: neither zero nor equal to any other
/// address of the region, so that a server that mixes them up is found out.
pub const GUEST_BASE: u64 = 1 << 30;

impl GuestMemory {
    /// At least `len` bytes, zeroed and resident.
    pub fn new(len: usize) -> Result<GuestMemory> {
        let len = len.next_multiple_of(REGION_ALIGN);
        let fd = memfd_create(c"fathom-bench", MemfdFlags::CLOEXEC)
            .map_err(|e| Error::os("creating a memfd", e))?;
        ftruncate(&fd, len as u64).map_err(|e| Error::os("sizing a memfd", e))?;
        let map = Mapping::shared(fd.as_fd(), len, true)?;
        Ok(GuestMemory {
            file: File::from(fd),
            map,
        })
    }

    /// The mapping.
    pub fn map(&self) -> &Mapping {
        &self.map
    }

    /// The memfd, for the server.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Guest-physical address of byte `offset`.
    pub fn guest_address(offset: usize) -> u64 {
        GUEST_BASE + offset as u64
    }
}

/// Hands out parts of a region.
#[derive(Debug, Default)]
pub struct Layout {
    next: usize,
}

impl Layout {
    /// Offset of the next `len` bytes at a multiple of `align`, a power of two.
    pub fn take(&mut self, len: usize, align: usize) -> usize {
        let at = self.next.next_multiple_of(align);
        self.next = at + len;
        at
    }

    /// Bytes handed out so far, with padding.
    pub fn len(&self) -> usize {
        self.next
    }
}

/// A request's data, reached by whole words.
///
/// The other side may be another process that breaks the rules, so that access
/// is volatile and never through a reference.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    base: *mut u64,
    words: usize,
}

impl Buffer {
    /// # Safety
    /// `base` is aligned to 8, and `len` bytes (a multiple of 8) from it stay
    /// mapped for as long as the buffer is used.
    pub unsafe fn new(base: *mut u8, len: usize) -> Buffer {
        debug_assert!(base.cast::<u64>().is_aligned() && len.is_multiple_of(8));
        Buffer {
            base: base.cast(),
            words: len / 8,
        }
    }

    /// Number of 8-byte words.
    pub fn words(&self) -> usize {
        self.words
    }

    /// The word at `index`.
    #[inline(always)]
    pub fn load(&self, index: usize) -> u64 {
        assert!(index < self.words);
        // SAFETY: in bounds of a live mapping by the contract of `new`.
        unsafe { self.base.add(index).read_volatile() }
    }

    /// Sets the word at `index`.
    #[inline(always)]
    pub fn store(&self, index: usize, value: u64) {
        assert!(index < self.words);
        // SAFETY: in bounds of a live mapping by the contract of `new`.
        unsafe { self.base.add(index).write_volatile(value) }
    }

    /// The address, for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.cast()
    }
}
