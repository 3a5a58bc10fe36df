//! Which stripes of a base image are there: a file that its keeper writes and everybody else maps.
//!
//! A stripe has a word, which only grows: odd while it is there. Who has read a stripe's data looks once more: if
//! the word has not changed, it was there all the time. So the keeper lets a stripe go by one store, without
//! asking anybody, and takes its place away afterwards.

use fathom_sigbus::{Alarm, Guarded, Spare};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Before the words there is what is the keeper's alone.
pub const HEADER: u64 = 4096;

const PAGE: u64 = 4096;

/// The length of the file.
pub fn len_for(stripes: u64) -> u64 {
    (HEADER + 4 * stripes).next_multiple_of(PAGE)
}

/// A mapping of the file.
pub struct LiveMap {
    start: *mut AtomicU32,
    bytes: usize,
    stripes: u32,
    writable: bool,
    /// Before it is unmapped.
    guard: Option<Guarded>,
}

// SAFETY: it is shared memory that is read and written by atomic operations only.
unsafe impl Send for LiveMap {}
// SAFETY: likewise.
unsafe impl Sync for LiveMap {}

/// A file that somebody has cut shows zeroes: nothing is there.
struct Cut(Spare);

impl Alarm for Cut {
    fn raise(&self) {}

    fn spare(&self) -> &Spare {
        &self.0
    }
}

impl LiveMap {
    /// Of a file that has been made for so many stripes.
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
        // SAFETY: the mapping is that long, aligned to a page, and lives as long as this; its words are only
        // reached by atomic operations.
        unsafe { slice::from_raw_parts(self.start.add(skipped), self.stripes as usize) }
    }

    pub fn stripes(&self) -> u32 {
        self.stripes
    }

    #[inline]
    pub fn has(&self, stripe: u32) -> bool {
        self.words()[stripe as usize].load(Ordering::Acquire) % 2 == 1
    }

    /// None: not all of them are there. Otherwise a number that is another one once any of them has not been
    /// there in between.
    #[inline]
    pub fn look(&self, (first, count): super::wire::Run) -> Option<u64> {
        let first = first as usize;
        let mut sum = 0;
        for word in &self.words()[first..first + count as usize] {
            // After what was read before this, before what is read after it.
            let word = word.load(Ordering::SeqCst);
            if word % 2 == 0 {
                return None;
            }
            sum += u64::from(word);
        }
        Some(sum)
    }

    /// By the keeper: the stripe's data is in its place.
    pub fn add(&self, stripe: u32) {
        self.step(stripe, false);
    }

    /// By the keeper: the stripe's place is about to be taken away.
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
        // SAFETY: the mapping of `map`, which nobody refers to any more.
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
