//! Memory for secrets: left out of core files, not written to swap where locking is allowed, and wiped
//! when it is dropped.

use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};
use std::slice;
use zeroize::Zeroize;

/// Pages of their own. All bytes are zero at first.
struct Pages {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages belong to this value alone, as those of a `Box<[u8]>` do.
unsafe impl Send for Pages {}
// SAFETY: likewise; only `&mut Pages` changes them.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: usize) -> Pages {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, whose address the kernel chooses.
        let map = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
        let at = NonNull::new(map.cast::<u8>()).filter(|_| map != libc::MAP_FAILED);
        let Some(at) = at else {
            handle_alloc_error(Layout::array::<u8>(len).unwrap_or(Layout::new::<u8>()));
        };
        // Neither can be had everywhere (RLIMIT_MEMLOCK), and the secret is needed all the same.
        // SAFETY: both concern the new mapping only, and do not change what is in it.
        unsafe {
            libc::madvise(map, len, libc::MADV_DONTDUMP);
            libc::mlock(map, len);
        }
        Pages { at, len }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped so many bytes there, and nobody else has a reference.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }.zeroize();
        // SAFETY: likewise; nobody has the address from here on. The lock ends with the mapping.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Bytes of a secret, at least one.
pub struct GuardedBytes(Pages);

impl GuardedBytes {
    /// Copies a secret. The caller wipes its own copy.
    pub fn copy_of(bytes: &[u8]) -> GuardedBytes {
        let mut copy = GuardedBytes(Pages::new(bytes.len()));
        copy.copy_from_slice(bytes);
        copy
    }
}

impl Deref for GuardedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `Pages::new` has mapped so many bytes there, all of them initialised.
        unsafe { slice::from_raw_parts(self.0.at.as_ptr(), self.0.len) }
    }
}

impl DerefMut for GuardedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the borrow of `self` is exclusive.
        unsafe { slice::from_raw_parts_mut(self.0.at.as_ptr(), self.0.len) }
    }
}

/// A secret value: a key schedule, for example.
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
        // SAFETY: the pages have room for a `T`, begin at the start of a page, and hold no value yet.
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
        // SAFETY: `new` has put a `T` there, which lives as long as `self`.
        unsafe { self.pages.at.cast::<T>().as_ref() }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: `new` has put a `T` there, which nobody uses any more. The pages are wiped after this.
        unsafe { self.pages.at.cast::<T>().drop_in_place() };
    }
}

/// What /proc/self/smaps calls the properties of the memory at `address`.
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

    /// A few pages may be locked nearly everywhere; where they may not, that is no error.
    #[test]
    fn secrets_are_locked_where_that_is_allowed() {
        let probe = Pages::new(1);
        // SAFETY: it concerns the probe's own mapping.
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
