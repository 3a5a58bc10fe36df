//! Guest memory that the front-end has shared, and how this process accesses it.

use fathom_core::Buffer;
use libc::iovec;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

/// A mapped region of a guest's memory.
#[derive(Clone)]
pub struct GuestRegion {
    /// Guest physical address of the first byte.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u64,
    /// Address of the first byte in the front-end's address space, in which the front-end expresses
    /// ring addresses.
    pub user_addr: u64,
    /// Address of the mapping in this process.
    pub host: NonNull<u8>,
    /// Keeps the mapping alive.
    pub owner: Arc<dyn Any + Send + Sync>,
}

impl GuestRegion {
    /// Returns address and length of the mapping in this process.
    pub fn buffer(&self) -> Buffer {
        Buffer {
            addr: self.host.as_ptr() as usize,
            len: self.len as usize,
        }
    }
}

// SAFETY: `host` is an address of a mapping that `owner` (Send and Sync) keeps; all accesses
// through it are volatile or atomic.
unsafe impl Send for GuestRegion {}
// SAFETY: as above.
unsafe impl Sync for GuestRegion {}

/// Reason why a set of regions is rejected.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MemoryError {
    /// A region has no bytes.
    #[error("memory region at guest address {gpa:#x} is empty")]
    Empty {
        /// Guest physical address of the region.
        gpa: u64,
    },
    /// A region extends beyond the end of an address space.
    #[error("memory region at guest address {gpa:#x} wraps around the end of the address space")]
    Wraps {
        /// Guest physical address of the region.
        gpa: u64,
    },
    /// Two regions have bytes in common.
    #[error("memory regions at guest addresses {first:#x} and {second:#x} overlap")]
    Overlap {
        /// Guest physical address of the lower region.
        first: u64,
        /// Guest physical address of the higher region.
        second: u64,
    },
}

/// All memory of one guest, as described by one memory table.
pub struct GuestMemory {
    /// Sorted by `gpa`.
    regions: Vec<GuestRegion>,
    poisoned: AtomicBool,
}

impl GuestMemory {
    /// Creates the memory from its regions.
    ///
    /// # Safety
    /// In every region, `host` is the start of a readable and writable mapping of at least `len`
    /// bytes. The mapping stays in place while `owner` lives, and no Rust reference to it exists.
    /// The other owner of the file may truncate it. A SIGBUS handler must deal with that: it maps
    /// something else there and calls [`GuestMemory::poison`].
    pub unsafe fn new(mut regions: Vec<GuestRegion>) -> Result<GuestMemory, MemoryError> {
        regions.sort_by_key(|region| region.gpa);
        for region in &regions {
            let gpa = region.gpa;
            if region.len == 0 {
                return Err(MemoryError::Empty { gpa });
            }
            let wraps = |start: u64| start.checked_add(region.len - 1).is_none();
            if wraps(gpa) || wraps(region.user_addr) || wraps(region.host.as_ptr() as u64) {
                return Err(MemoryError::Wraps { gpa });
            }
        }
        for pair in regions.windows(2) {
            if pair[1].gpa - pair[0].gpa < pair[0].len {
                return Err(MemoryError::Overlap {
                    first: pair[0].gpa,
                    second: pair[1].gpa,
                });
            }
        }
        Ok(GuestMemory {
            regions,
            poisoned: AtomicBool::new(false),
        })
    }

    /// Returns the regions, by ascending guest physical address.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Records that the memory no longer matches the guest's, so that its queues stop.
    /// Async-signal-safe.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// Returns whether the memory no longer matches the guest's. See [`GuestMemory::poison`].
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// Returns the host address of `len` bytes at guest physical address `gpa`. None unless all of
    /// them lie in one region.
    pub fn translate(&self, gpa: u64, len: u64) -> Option<NonNull<u8>> {
        RegionCache::default().translate(self, gpa, len)
    }

    /// Returns the host address of `len` bytes at the front-end's address `user_addr`.
    pub fn translate_user(&self, user_addr: u64, len: u64) -> Option<NonNull<u8>> {
        self.regions.iter().find_map(|region| {
            let offset = user_addr.checked_sub(region.user_addr)?;
            (offset < region.len && len <= region.len - offset)
                // SAFETY: `offset` lies within the region's mapping.
                .then(|| unsafe { region.host.add(offset as usize) })
        })
    }

    /// Returns the guest physical address of a host address that `translate` returned.
    pub fn gpa_of(&self, host: *const u8) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = (host as u64).checked_sub(region.host.as_ptr() as u64)?;
            (offset < region.len).then(|| region.gpa + offset)
        })
    }

    fn region_at(&self, gpa: u64) -> Option<&GuestRegion> {
        let after = self.regions.partition_point(|region| region.gpa <= gpa);
        let region = &self.regions[after.checked_sub(1)?];
        (gpa - region.gpa < region.len).then_some(region)
    }
}

/// The region that was used last. Nearly all addresses of a queue lie in one region.
#[derive(Clone, Copy)]
pub struct RegionCache {
    gpa: u64,
    len: u64,
    host: NonNull<u8>,
}

// SAFETY: only a copy of a `GuestRegion`, which is Send.
unsafe impl Send for RegionCache {}

impl Default for RegionCache {
    /// Returns a cache without a region.
    fn default() -> RegionCache {
        RegionCache {
            gpa: 0,
            len: 0,
            host: NonNull::dangling(),
        }
    }
}

impl RegionCache {
    /// Like [`GuestMemory::translate`]. `memory` must be the same in every call.
    #[inline(always)]
    pub fn translate(&mut self, memory: &GuestMemory, gpa: u64, len: u64) -> Option<NonNull<u8>> {
        match self.lookup(gpa, len) {
            None => self.translate_elsewhere(memory, gpa, len),
            found => found,
        }
    }

    #[cold]
    #[inline(never)]
    fn translate_elsewhere(
        &mut self,
        memory: &GuestMemory,
        gpa: u64,
        len: u64,
    ) -> Option<NonNull<u8>> {
        self.fill(memory, gpa)?;
        self.lookup(gpa, len)
    }

    #[inline(always)]
    fn lookup(&self, gpa: u64, len: u64) -> Option<NonNull<u8>> {
        let offset = gpa.wrapping_sub(self.gpa);
        if offset < self.len && len <= self.len - offset {
            // SAFETY: `offset` lies within the region's mapping.
            return Some(unsafe { self.host.add(offset as usize) });
        }
        None
    }

    fn fill(&mut self, memory: &GuestMemory, gpa: u64) -> Option<()> {
        let region = memory.region_at(gpa)?;
        *self = RegionCache {
            gpa: region.gpa,
            len: region.len,
            host: region.host,
        };
        Some(())
    }

    /// Passes the pieces of a buffer that may span adjacent regions to `piece`, in order. None if
    /// any part lies outside; `piece` may have been called before.
    #[cold]
    pub(crate) fn pieces(
        &mut self,
        memory: &GuestMemory,
        mut gpa: u64,
        mut len: u64,
        mut piece: impl FnMut(iovec),
    ) -> Option<()> {
        gpa.checked_add(len)?;
        while len > 0 {
            self.fill(memory, gpa)?;
            let here = len.min(self.len - (gpa - self.gpa));
            piece(segment(self.lookup(gpa, here)?, here));
            gpa += here;
            len -= here;
        }
        Some(())
    }

    /// Returns a private copy of 16 bytes as two little-endian words. The bytes may span regions.
    /// None if any of them lies outside.
    #[inline(always)]
    pub(crate) fn read_pair(&mut self, memory: &GuestMemory, gpa: u64) -> Option<[u64; 2]> {
        match self.lookup(gpa, 16) {
            // SAFETY: `lookup` has found 16 bytes there.
            Some(host) if is_aligned(host) => Some(unsafe { read_pair(host) }),
            _ => self.read_pair_anywhere(memory, gpa),
        }
    }

    #[cold]
    #[inline(never)]
    fn read_pair_anywhere(&mut self, memory: &GuestMemory, gpa: u64) -> Option<[u64; 2]> {
        let mut bytes = [0; 16];
        self.read(memory, gpa, &mut bytes)?;
        Some(pair_of(bytes))
    }

    /// Copies bytes out of guest memory; they may span regions. None if any of them lies outside.
    #[cold]
    pub(crate) fn read(&mut self, memory: &GuestMemory, gpa: u64, bytes: &mut [u8]) -> Option<()> {
        let mut done = 0;
        self.pieces(memory, gpa, bytes.len() as u64, |piece| {
            for i in 0..piece.iov_len {
                // SAFETY: `pieces` hands out only mapped memory.
                bytes[done] = unsafe { piece.iov_base.cast::<u8>().add(i).read_volatile() };
                done += 1;
            }
        })
    }
}

#[inline(always)]
pub(crate) fn segment(host: NonNull<u8>, len: u64) -> iovec {
    iovec {
        iov_base: host.as_ptr().cast(),
        iov_len: len as usize,
    }
}

/// Converts 16 bytes to two little-endian words.
pub(crate) fn pair_of(bytes: [u8; 16]) -> [u64; 2] {
    let bits = u128::from_le_bytes(bytes);
    [bits as u64, (bits >> 64) as u64]
}

/// Returns whether [`read_pair`] can read at this address.
#[inline(always)]
pub(crate) fn is_aligned(host: NonNull<u8>) -> bool {
    host.cast::<u64>().is_aligned()
}

/// Returns a private copy of 16 bytes of guest memory as two little-endian words. Each word is read
/// once.
///
/// # Safety
/// The 16 bytes at `host` are mapped, and `host` is 8-byte aligned.
#[inline(always)]
pub(crate) unsafe fn read_pair(host: NonNull<u8>) -> [u64; 2] {
    let words = host.cast::<u64>();
    // SAFETY: by the caller.
    unsafe {
        [
            u64::from_le(words.read_volatile()),
            u64::from_le(words.add(1).read_volatile()),
        ]
    }
}

/// Returns a little-endian u16 that both sides access at any time.
///
/// # Safety
/// The two bytes at `host` are mapped for 'a, are 2-byte aligned, and are accessed in this process
/// only atomically.
#[inline(always)]
pub(crate) unsafe fn shared_u16<'a>(host: NonNull<u8>) -> &'a AtomicU16 {
    // SAFETY: by the caller. An atomic, unlike any other reference, may be shared with others that
    // change it.
    unsafe { AtomicU16::from_ptr(host.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(gpa: u64, len: u64, user_addr: u64, host: u64) -> GuestRegion {
        GuestRegion {
            gpa,
            len,
            user_addr,
            host: NonNull::new(host as *mut u8).unwrap(),
            owner: Arc::new(()),
        }
    }

    /// This memory is never accessed: these tests only compute addresses.
    fn memory(regions: Vec<GuestRegion>) -> Result<GuestMemory, MemoryError> {
        // SAFETY: no address of this memory is ever accessed.
        unsafe { GuestMemory::new(regions) }
    }

    fn three() -> GuestMemory {
        // The regions are given in the wrong order. The last two are adjacent in guest addresses.
        memory(vec![
            region(0x4000, 0x1000, 0x94000, 0x7_0000),
            region(0x3000, 0x1000, 0x93000, 0x5_0000),
            region(0, 0x1000, 0x90000, 0x6_0000),
        ])
        .unwrap()
    }

    fn address(host: Option<NonNull<u8>>) -> Option<u64> {
        host.map(|host| host.as_ptr() as u64)
    }

    #[test]
    fn addresses_translate_within_one_region() {
        let memory = three();
        let cases = [
            (0, 1, Some(0x6_0000)),
            (0xfff, 1, Some(0x6_0fff)),
            (0x800, 0x800, Some(0x6_0800)),
            (0x800, 0x801, None),
            (0x1000, 1, None),
            (0x2fff, 2, None),
            (0x3fff, 1, Some(0x5_0fff)),
            (0x3fff, 2, None),
            (0x4000, 0x1000, Some(0x7_0000)),
            (0x5000, 1, None),
            (u64::MAX, 1, None),
            (0xfff, u64::MAX, None),
        ];
        let mut cache = RegionCache::default();
        for (gpa, len, expected) in cases {
            let got = address(memory.translate(gpa, len));
            assert_eq!(got, expected, "{gpa:#x} {len:#x}");
            // The result does not depend on earlier contents of the cache.
            let got = address(cache.translate(&memory, gpa, len));
            assert_eq!(got, expected, "{gpa:#x} {len:#x}, cached");
            let user = address(memory.translate_user(gpa.wrapping_add(0x90000), len));
            assert_eq!(user, expected, "{gpa:#x} {len:#x}, user address");
        }
    }

    #[test]
    fn guest_addresses_come_back_from_host_addresses() {
        let memory = three();
        let gpa_of = |host: u64| memory.gpa_of(host as *const u8);
        assert_eq!(gpa_of(0x6_0000), Some(0));
        assert_eq!(gpa_of(0x5_0fff), Some(0x3fff));
        assert_eq!(gpa_of(0x5_1000), None);
        assert_eq!(gpa_of(0), None);
    }

    #[test]
    fn buffers_across_adjacent_regions_come_in_pieces() {
        let memory = three();
        let mut pieces = Vec::new();
        let mut collect = |gpa, len| {
            pieces.clear();
            let mut cache = RegionCache::default();
            let whole = cache.pieces(&memory, gpa, len, |piece| {
                pieces.push((piece.iov_base as u64, piece.iov_len));
            });
            whole.map(|()| pieces.clone())
        };
        assert_eq!(
            collect(0x3f00, 0x200),
            Some(vec![(0x5_0f00, 0x100), (0x7_0000, 0x100)])
        );
        assert_eq!(collect(0x4000, 0x10), Some(vec![(0x7_0000, 0x10)]));
        assert_eq!(collect(0xf00, 0x200), None, "a gap");
        assert_eq!(collect(0x4f00, 0x200), None, "the end");
        assert_eq!(collect(u64::MAX, 2), None, "wraps around");
    }

    #[test]
    fn regions_that_make_no_sense_are_refused() {
        let refused = |regions| memory(regions).err().unwrap();
        assert_eq!(
            refused(vec![region(0x1000, 0, 0, 0x1000)]),
            MemoryError::Empty { gpa: 0x1000 }
        );
        let last_page = u64::MAX - 0xfff;
        for (gpa, user, host) in [
            (last_page, 0, 0x1000),
            (0, last_page, 0x1000),
            (0, 0, last_page),
        ] {
            let wraps = refused(vec![region(gpa, 0x1001, user, host)]);
            assert_eq!(wraps, MemoryError::Wraps { gpa });
            assert!(memory(vec![region(gpa, 0x1000, user, host)]).is_ok());
        }
        assert_eq!(
            refused(vec![
                region(0x1000, 0x1000, 0, 0x1000),
                region(0xfff, 2, 0x9000, 0x5000),
            ]),
            MemoryError::Overlap {
                first: 0xfff,
                second: 0x1000
            }
        );
    }

    #[test]
    fn the_last_byte_of_the_address_space_can_be_reached() {
        let last_page = u64::MAX - 0xfff;
        let memory = memory(vec![region(last_page, 0x1000, 0, 0x1000)]).unwrap();
        assert_eq!(address(memory.translate(u64::MAX, 1)), Some(0x1fff));
        assert_eq!(address(memory.translate(u64::MAX, 2)), None);
    }
}
