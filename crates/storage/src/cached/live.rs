//! The live map: which stripes of a base image are in the cache. The keeper writes this file, and
//! all others map it.
//!
//! Each stripe has a word that only grows, and is odd while the stripe is in the cache. A reader of
//! a stripe's data checks the word again after the read: if it has not changed, the stripe was in
//! the cache throughout. Therefore the keeper removes a stripe by one store, without asking any
//! reader, and frees its space afterwards.

use fathom_sigbus::{Alarm, Guarded, Spare};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of bytes before the words, which are for the keeper only.
pub const HEADER: u64 = 4096;

const PAGE: u64 = 4096;

/// Returns the length of the file in bytes.
pub fn len_for(stripes: u64) -> u64 {
    (HEADER + 4 * stripes).next_multiple_of(PAGE)
}

/// A mapping of the file.
pub struct LiveMap {
    start: *mut AtomicU32,
    bytes: usize,
    stripes: u32,
    writable: bool,
    /// Guard against SIGBUS, which must be dropped before the memory is unmapped.
    guard: Option<Guarded>,
}

// SAFETY: the map is shared memory that is read and written by atomic operations only.
unsafe impl Send for LiveMap {}
// SAFETY: as for Send.
unsafe impl Sync for LiveMap {}

/// Replaces pages of a truncated file by zeroes: no stripe is in the cache.
struct Cut(Spare);

impl Alarm for Cut {
    fn raise(&self) {}

    fn spare(&self) -> &Spare {
        &self.0
    }
}

impl LiveMap {
    /// Maps a file that was made for that many stripes.
    pub fn map(file: impl AsFd, stripes: u64, writable: bool) -> io::Result<LiveMap> {
        let bytes = len_for(stripes);
        let is_long = rustix::fs::fstat(&file)?.st_size as u64 >= bytes;
        if !is_long || stripes > super::wire::MAX_STRIPES {
            return Err(io::Error::other("the cache's map is too short"));
        }
        let bytes = bytes as usize;
        let access = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(null_mut(), bytes, access, MapFlags::SHARED, file, 0)? };
        let mut map = LiveMap {
            start: start.cast(),
            bytes,
            stripes: stripes as u32,
            writable,
            guard: None,
        };
        let alarm = Arc::new(Cut(Spare::new()?));
        map.guard = Some(Guarded::new(start.cast(), bytes, PAGE as usize, alarm)?);
        Ok(map)
    }

    fn words(&self) -> &[AtomicU32] {
        let skipped = HEADER as usize / 4;
        // SAFETY: the mapping has that length, is page-aligned, and is unmapped only when this
        // value is dropped; its words are only accessed by atomic operations.
        unsafe { slice::from_raw_parts(self.start.add(skipped), self.stripes as usize) }
    }

    /// Returns the number of stripes of the image.
    pub fn stripes(&self) -> u32 {
        self.stripes
    }

    /// Returns whether the stripe is in the cache.
    ///
    /// # Panics
    /// If the image has no stripe with this number.
    #[inline]
    pub fn has(&self, stripe: u32) -> bool {
        self.words()[stripe as usize].load(Ordering::Acquire) % 2 == 1
    }

    /// Returns None if any of the stripes is missing. Otherwise returns a number that changes if
    /// any of them is removed before the next call.
    #[inline]
    pub fn look(&self, (first, count): super::wire::Run) -> Option<u64> {
        let first = first as usize;
        let mut sum = 0;
        for word in &self.words()[first..first + count as usize] {
            // Ordered after earlier reads of the data and before later ones.
            let word = word.load(Ordering::SeqCst);
            if word % 2 == 0 {
                return None;
            }
            sum += u64::from(word);
        }
        Some(sum)
    }

    /// Marks the stripe as present; called by the keeper once its data is in place.
    pub fn add(&self, stripe: u32) {
        self.step(stripe, false);
    }

    /// Marks the stripe as missing; called by the keeper before it frees the stripe's space.
    pub fn remove(&self, stripe: u32) {
        self.step(stripe, true);
    }

    fn step(&self, stripe: u32, was: bool) {
        assert!(self.writable, "only the keeper writes");
        let word = &self.words()[stripe as usize];
        if self.has(stripe) == was {
            word.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Drop for LiveMap {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: the mapping was made by `map`, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.start.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn file(stripes: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len_for(stripes)).unwrap();
        file
    }

    #[test]
    fn who_has_read_sees_that_a_stripe_has_gone_and_come_back() {
        let file = file(3000);
        let keeper = LiveMap::map(&file, 3000, true).unwrap();
        let user = LiveMap::map(&file, 3000, false).unwrap();
        assert_eq!(user.look((2998, 2)), None);
        keeper.add(2998);
        assert_eq!(user.look((2998, 2)), None);
        keeper.add(2999);
        let seen = user.look((2998, 2));
        assert!(seen.is_some());
        keeper.add(2999);
        assert_eq!(user.look((2998, 2)), seen);
        keeper.remove(2999);
        keeper.remove(2999);
        assert_eq!(user.look((2998, 2)), None);
        keeper.add(2999);
        assert!(user.look((2998, 2)).is_some_and(|now| Some(now) != seen));
    }

    #[test]
    fn a_file_that_is_cut_has_nothing() {
        let file = file(3000);
        let keeper = LiveMap::map(&file, 3000, true).unwrap();
        keeper.add(2999);
        assert!(LiveMap::map(&file, 4000, false).is_err());
        let user = LiveMap::map(&file, 3000, false).unwrap();
        file.set_len(0).unwrap();
        assert!(!user.has(2999) && user.look((0, 3000)).is_none());
    }
}
