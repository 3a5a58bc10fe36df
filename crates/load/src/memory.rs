//! Memory shared with the server, like a guest's memory.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// Bytes per bit of the vhost dirty log, regardless of the host's page size.
pub const PAGE: usize = 4096;
/// Alignment of region sizes in bytes: whole huge pages, because some servers map regions with huge
/// pages.
const REGION_ALIGN: usize = 2 << 20;

/// A memory mapping that is unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory without thread affinity; all access goes through raw pointers
// whose users state which accesses are allowed.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps private zeroed memory.
    pub fn anonymous(len: usize) -> Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) };
        Self::from_result(base, len, "allocating memory")
    }

    /// Maps the first `len` bytes of `file` as shared memory. `len` must not exceed the file size.
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

    /// Returns the address of the first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the byte at `offset`.
    ///
    /// # Panics
    /// If `offset..offset + len` is not inside the mapping. Layouts are computed once, before any
    /// load runs.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and no user of the mapping outlives it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The memory region of the emulated guest: a memfd and its mapping.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    map: Mapping,
}

/// Guest-physical address of the region. The address differs from zero and from the region's other
/// addresses, so that a server that confuses addresses fails.
pub const GUEST_BASE: u64 = 1 << 30;

impl GuestMemory {
    /// Allocates at least `len` bytes, zeroed and resident.
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

    /// Returns the mapping.
    pub fn map(&self) -> &Mapping {
        &self.map
    }

    /// Returns the memfd, to pass it to the server.
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the guest-physical address of the byte at `offset` in the region.
    pub fn guest_address(offset: usize) -> u64 {
        GUEST_BASE + offset as u64
    }
}

/// Allocates parts of a region.
#[derive(Debug, Default)]
pub struct Layout {
    next: usize,
}

impl Layout {
    /// Allocates `len` bytes and returns their offset, a multiple of `align`. `align` is a power of
    /// two.
    pub fn take(&mut self, len: usize, align: usize) -> usize {
        let at = self.next.next_multiple_of(align);
        self.next = at + len;
        at
    }

    /// Returns the number of allocated bytes, including padding.
    pub fn len(&self) -> usize {
        self.next
    }
}

/// The data of a request, accessed in whole words.
///
/// The other side may be a misbehaving process that accesses the memory at any time. Therefore all
/// accesses are volatile, and none uses a reference.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    base: *mut u64,
    words: usize,
}

impl Buffer {
    /// Creates a buffer.
    ///
    /// # Safety
    /// `base` is aligned to 8, and `len` bytes (a multiple of 8) from it stay mapped while the
    /// buffer is used.
    pub unsafe fn new(base: *mut u8, len: usize) -> Buffer {
        debug_assert!(base.cast::<u64>().is_aligned() && len.is_multiple_of(8));
        Buffer {
            base: base.cast(),
            words: len / 8,
        }
    }

    /// Returns the number of 8-byte words.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Returns the word at `index`.
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

    /// Returns the address, for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.cast()
    }
}
