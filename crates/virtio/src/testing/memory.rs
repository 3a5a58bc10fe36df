//! Guest memory between guard pages.

use crate::memory::{GuestMemory, GuestRegion};
use std::ptr::NonNull;
use std::sync::Arc;

const GUARD: usize = 4096;

/// An anonymous mapping of which only some parts are accessible.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that any thread may use.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes with PROT_NONE.
    fn reserve(len: usize) -> Mapping {
        // Shared with child processes, which the parent can then observe and kill.
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED, "cannot reserve {len} bytes");
        let base = NonNull::new(base.cast()).expect("mmap does not return null");
        Mapping { base, len }
    }

    /// Makes a part accessible.
    fn open(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: within the mapping.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: changes only this mapping.
        let result =
            unsafe { libc::mprotect(at.as_ptr().cast(), len, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(result, 0, "cannot open {len} bytes");
        at
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A guest's memory whose every region lies between inaccessible pages, so that a stray access ends
/// the test.
#[derive(Clone)]
pub struct TestMemory {
    guest: Arc<GuestMemory>,
}

impl TestMemory {
    /// Difference between the front-end's addresses and the guest's.
    pub const USER_OFFSET: u64 = 0x7000_0000_0000;

    /// Creates memory with regions of (guest physical address, length). Lengths are multiples of
    /// the page size.
    pub fn new(regions: &[(u64, u64)]) -> TestMemory {
        let total: usize = regions.iter().map(|(_, len)| *len as usize + GUARD).sum();
        let mapping = Arc::new(Mapping::reserve(total + GUARD));
        let mut offset = GUARD;
        let mut map = |(gpa, len): &(u64, u64)| {
            let host = mapping.open(offset, *len as usize);
            offset += *len as usize + GUARD;
            GuestRegion {
                gpa: *gpa,
                len: *len,
                user_addr: gpa + Self::USER_OFFSET,
                host,
                owner: mapping.clone(),
            }
        };
        let regions = regions.iter().map(&mut map).collect();
        // SAFETY: parts of a mapping that the regions keep.
        let guest = unsafe { GuestMemory::new(regions) }.expect("good regions");
        TestMemory {
            guest: Arc::new(guest),
        }
    }

    /// Returns the memory as a queue or a device uses it.
    pub fn guest(&self) -> &Arc<GuestMemory> {
        &self.guest
    }

    /// Returns the host address of memory that must exist.
    pub fn at(&self, gpa: u64, len: usize) -> *mut u8 {
        let host = self.guest.translate(gpa, len as u64);
        let host = host.unwrap_or_else(|| panic!("no {len} bytes at {gpa:#x}"));
        host.as_ptr()
    }

    /// Writes bytes from `gpa` on.
    ///
    /// # Panics
    /// Panics if not all of these addresses exist.
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: `at` has checked that it is mapped.
            unsafe { self.at(gpa + i as u64, 1).write_volatile(*byte) };
        }
    }

    /// Reads `len` bytes from `gpa` on.
    ///
    /// # Panics
    /// Panics if not all of these addresses exist.
    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        for region in self.guest.regions() {
            let from = gpa.max(region.gpa);
            let to = (gpa + len as u64).min(region.gpa + region.len);
            if from < to {
                let host = self.at(from, (to - from) as usize);
                // SAFETY: `at` has checked that it is mapped.
                bytes.extend(
                    (0..to - from).map(|i| unsafe { host.add(i as usize).read_volatile() }),
                );
            }
        }
        assert_eq!(bytes.len(), len, "no {len} bytes at {gpa:#x}");
        bytes
    }

    /// Writes a little-endian number at `gpa`, which must exist.
    pub fn write_u16(&self, gpa: u64, value: u16) {
        self.write(gpa, &value.to_le_bytes());
    }

    /// Reads a little-endian number at `gpa`, which must exist.
    pub fn read_u16(&self, gpa: u64) -> u16 {
        u16::from_le_bytes(self.read(gpa, 2).try_into().expect("two bytes"))
    }
}
