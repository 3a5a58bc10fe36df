//! Memory for secrets.
//!
//! The memory is excluded from core dumps, locked against swapping where the process may lock
//! memory, and wiped when it is dropped.

use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};
use std::slice;
use zeroize::Zeroize;

/// A private memory mapping. All bytes are initially zero.
struct Pages {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: only this value owns the mapping, as a `Box<[u8]>` owns its bytes.
unsafe impl Send for Pages {}
// SAFETY: only this value owns the mapping, and only `&mut Pages` allows changes to it.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: usize) -> Pages {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: this creates a new mapping at an address that the kernel chooses.
        let map = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
        let at = NonNull::new(map.cast::<u8>()).filter(|_| map != libc::MAP_FAILED);
        let Some(at) = at else {
            handle_alloc_error(Layout::array::<u8>(len).unwrap_or(Layout::new::<u8>()));
        };
        // Both calls may fail, for example because of RLIMIT_MEMLOCK. The secret must be stored
        // anyway, so failures are ignored.
        // SAFETY: both calls affect only the new mapping and do not change its contents.
        unsafe {
            libc::madvise(map, len, libc::MADV_DONTDUMP);
            libc::mlock(map, len);
        }
        Pages { at, len }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` mapped `len` bytes at this address, and no other reference to them exists.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }.zeroize();
        // SAFETY: `new` mapped `len` bytes at this address, and no code uses the address after this
        // call. Unmapping also unlocks the memory.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// The bytes of a secret; at least one byte.
pub struct GuardedBytes(Pages);

impl GuardedBytes {
    /// Copies a secret into guarded memory. The caller must wipe its own copy.
    pub fn copy_of(bytes: &[u8]) -> GuardedBytes {
        let mut copy = GuardedBytes(Pages::new(bytes.len()));
        copy.copy_from_slice(bytes);
        copy
    }
}

impl Deref for GuardedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `Pages::new` mapped `len` bytes at this address, all of them initialised.
        unsafe { slice::from_raw_parts(self.0.at.as_ptr(), self.0.len) }
    }
}

impl DerefMut for GuardedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `Pages::new` mapped `len` initialised bytes here, and the borrow of `self` is
        // exclusive.
        unsafe { slice::from_raw_parts_mut(self.0.at.as_ptr(), self.0.len) }
    }
}

/// A secret value, for example a key schedule.
pub struct Guarded<T> {
    pages: Pages,
    owns: PhantomData<T>,
}

impl<T> Guarded<T> {
    pub fn new(value: T) -> Guarded<T> {
        const {
            assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096);
        }
        let pages = Pages::new(size_of::<T>());
        // SAFETY: the mapping is large enough for a `T`, is page-aligned, and contains no value
        // yet.
        unsafe { pages.at.as_ptr().cast::<T>().write(value) };
        Guarded {
            pages,
            owns: PhantomData,
        }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` wrote a `T` to this address, and the `T` is valid until `self` is dropped.
        unsafe { self.pages.at.cast::<T>().as_ref() }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: `new` wrote a `T` to this address, and no reference to the `T` exists any more.
        // Dropping `pages` wipes the memory afterwards.
        unsafe { self.pages.at.cast::<T>().drop_in_place() };
    }
}

/// Returns the `VmFlags` that /proc/self/smaps reports for the memory at `address`.
#[cfg(test)]
pub fn flags_of(address: *const u8) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_there = false;
    for line in maps.lines() {
        let range = line
            .split_whitespace()
            .next()
            .and_then(|word| word.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((from, to)) = range.and_then(|(from, to)| Some((number(from)?, number(to)?))) {
            is_there = (from..to).contains(&(address as usize));
        }
        if is_there && let Some(flags) = line.strip_prefix("VmFlags:") {
            return format!("{flags} ");
        }
    }
    panic!("nothing is at that address");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_in_memory_that_is_not_dumped() {
        let bytes = GuardedBytes::copy_of(b"secret");
        let value = Guarded::new([7u64; 9]);
        assert_eq!((&*bytes, *value), (&b"secret"[..], [7; 9]));
        for address in [bytes.as_ptr(), value.as_ptr().cast()] {
            let flags = flags_of(address);
            assert!(flags.contains(" dd "), "{flags}");
        }
    }

    /// Most systems allow a process to lock a few pages. If locking is not allowed, that is no
    /// error.
    #[test]
    fn secrets_are_locked_where_that_is_allowed() {
        let probe = Pages::new(1);
        // SAFETY: `mlock` affects only the probe's own mapping.
        let may_lock = unsafe { libc::mlock(probe.at.as_ptr().cast(), 1) } == 0;
        let bytes = GuardedBytes::copy_of(b"secret");
        assert_eq!(flags_of(bytes.as_ptr()).contains(" lo "), may_lock);
    }

    #[test]
    fn values_are_dropped_once() {
        let counted = std::sync::Arc::new(());
        let guarded = Guarded::new(counted.clone());
        assert_eq!(std::sync::Arc::strong_count(&guarded), 2);
        drop(guarded);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }
}
