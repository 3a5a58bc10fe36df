//! A section of a disk in memory: anonymous files, which can be shared with another process.

use libc::iovec;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const PAGE: u64 = 4096;
/// Number of pages per word of [`Part::written`].
const BITS: u64 = 64;

/// A section of the disk, and its memory.
pub(super) struct Part {
    /// Byte range of the disk, page-aligned at both ends.
    pub(super) range: Range<u64>,
    bytes: Mapping,
    /// A bit for each page: set if the page has been written. Other pages read as zeroes; reading
    /// them through the mapping would allocate memory.
    written: Mapping,
}

/// An anonymous file that cannot shrink, and its mapping.
struct Mapping {
    file: OwnedFd,
    base: *mut u8,
    len: u64,
}

// SAFETY: the mapping exists until the value is dropped. The mapped bytes are a disk's sectors:
// they are read and written through raw pointers only, and never borrowed. Guests that race on a
// sector get what a disk gives them.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: u64) -> io::Result<Mapping> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("fathom-disk", flags)?;
        ftruncate(&file, len).map_err(|error| match error {
            Errno::FBIG => io::Error::other("the file size limit is exceeded (ulimit -f)"),
            other => other.into(),
        })?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Mapping::of(file, len)
    }

    /// Maps a file that must have this length and be sealed against shrinking.
    fn of(file: OwnedFd, len: u64) -> io::Result<Mapping> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) || fstat(&file)?.st_size as u64 != len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that cannot shrink.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                usize::try_from(len).map_err(io::Error::other)?,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )?
        };
        let base = base.cast();
        Ok(Mapping { file, base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing uses it any more.
        let unmapped = unsafe { munmap(self.base.cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

impl Part {
    pub(super) fn new(start: u64, len: u64) -> io::Result<Part> {
        let range = pages(start, len)?;
        Ok(Part {
            bytes: Mapping::new(range.end - start)?,
            written: Mapping::new(bits_len(&range))?,
            range,
        })
    }

    /// Makes a part of the files that another part's [`Part::files`] returned.
    pub(super) fn of(range: Range<u64>, bytes: OwnedFd, written: OwnedFd) -> io::Result<Part> {
        let len = range.end.saturating_sub(range.start);
        if pages(range.start, len)? != range || len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Part {
            bytes: Mapping::of(bytes, len)?,
            written: Mapping::of(written, bits_len(&range))?,
            range,
        })
    }

    /// Returns the files from which [`Part::of`] makes the same part.
    pub(super) fn files(&self) -> [BorrowedFd<'_>; 2] {
        [self.bytes.file.as_fd(), self.written.file.as_fd()]
    }

    /// Returns the address of a byte of the disk in this part, or of the part's end.
    #[inline]
    fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset >= self.range.start && offset <= self.range.end);
        // SAFETY: the offset lies within the mapping or at its end.
        unsafe { self.bytes.base.add((offset - self.range.start) as usize) }
    }

    /// Returns the memory of a range of this part.
    #[inline]
    pub(super) fn iovec(&self, range: &Range<u64>) -> iovec {
        iovec {
            iov_base: self.at(range.start).cast(),
            iov_len: (range.end - range.start) as usize,
        }
    }

    /// Returns the words with the bits of a range's pages, each with the mask of these bits.
    #[inline]
    fn words(&self, range: &Range<u64>) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let first = (range.start - self.range.start) / PAGE;
        let last = (range.end - 1 - self.range.start) / PAGE;
        (first / BITS..=last / BITS).map(move |word| {
            let from = first.max(word * BITS) % BITS;
            let to = last.min(word * BITS + BITS - 1) % BITS;
            let mask = u64::MAX >> (BITS - 1 - (to - from)) << from;
            // SAFETY: the mapping has a word for every 64 pages of the part or fraction of them.
            // The word is aligned and shared, as atomics may be.
            let word = unsafe { &*self.written.base.cast::<AtomicU64>().add(word as usize) };
            (word, mask)
        })
    }

    /// Returns whether all pages of a range, which must not be empty, have been written.
    #[inline]
    pub(super) fn is_written(&self, range: &Range<u64>) -> bool {
        let mut words = self.words(range);
        words.all(|(word, mask)| word.load(Ordering::Acquire) & mask == mask)
    }

    /// Marks the pages of a range as written, after the data was copied. If they were marked before
    /// the copy, a concurrent discard could leave bytes in an unmarked page, which a later write
    /// next to them would expose.
    #[inline]
    pub(super) fn wrote(&self, range: &Range<u64>) {
        for (word, mask) in self.words(range) {
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        }
    }

    /// Splits a range into pieces that have, or have not, been written.
    pub(super) fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (bool, Range<u64>)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = at;
            let end_of = |at: u64| range.end.min((at / PAGE + 1) * PAGE);
            let is_written =
                (start < range.end).then(|| self.is_written(&(start..end_of(start))))?;
            at = end_of(start);
            while at < range.end && self.is_written(&(at..end_of(at))) == is_written {
                at = end_of(at);
            }
            Some((is_written, start..at))
        })
    }

    /// Frees whole pages of a range and zeroes its partial pages.
    pub(super) fn zero(&self, range: Range<u64>) -> Result<(), i32> {
        let whole = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if whole.is_empty() {
            self.clear(range);
            return Ok(());
        }
        self.clear(range.start..whole.start);
        self.clear(whole.end..range.end);
        let mut any = false;
        for (word, mask) in self.words(&whole) {
            any |= word.load(Ordering::Relaxed) & mask != 0
                && word.fetch_and(!mask, Ordering::AcqRel) & mask != 0;
        }
        if !any {
            return Ok(());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, len) = (whole.start - self.range.start, whole.end - whole.start);
        fallocate(&self.bytes.file, how, start, len).map_err(|error| {
            // Freeing failed: the pages still have their data.
            self.wrote(&whole);
            error.raw_os_error()
        })
    }

    /// Zeroes the written pages of a range through the mapping.
    fn clear(&self, range: Range<u64>) {
        for (is_written, piece) in self.pieces(range) {
            if is_written {
                let memory = self.iovec(&piece);
                // SAFETY: the piece is mapped.
                unsafe { memory.iov_base.cast::<u8>().write_bytes(0, memory.iov_len) };
            }
        }
    }

    /// Zeroes a range, which no request may use meanwhile.
    pub(super) fn forget(&self, range: Range<u64>) {
        if self.zero(range.clone()).is_err() {
            // Pages that cannot be freed are zeroed instead.
            self.clear(range);
        }
    }
}

/// Returns the range of whole pages from `start` on that holds `len` bytes.
fn pages(start: u64, len: u64) -> io::Result<Range<u64>> {
    let end = start
        .checked_add(len)
        .and_then(|end| end.checked_next_multiple_of(PAGE));
    let end = end.ok_or(io::ErrorKind::OutOfMemory)?;
    match start.is_multiple_of(PAGE) {
        true => Ok(start..end),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Returns the number of bytes of a part's page bits.
fn bits_len(range: &Range<u64>) -> u64 {
    ((range.end - range.start) / PAGE).div_ceil(BITS) * 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_of_their_pages() {
        let start = 128 * PAGE;
        let part = Part::new(start, 300 * PAGE).unwrap();
        let all = part.range.clone();
        let page = |n: u64| start + n * PAGE..start + (n + 1) * PAGE;
        for (first, last) in [
            (0, 0),
            (63, 64),
            (64, 127),
            (5, 200),
            (128, 191),
            (299, 299),
        ] {
            let wrote = page(first).start + 511..page(last).end - 511;
            assert!(!part.is_written(&wrote));
            part.wrote(&wrote);
            let inner = page(first).start..page(last).end;
            let expected = [
                (false, all.start..inner.start),
                (true, inner.clone()),
                (false, inner.end..all.end),
            ];
            let expected: Vec<_> = expected
                .into_iter()
                .filter(|(_, range)| !range.is_empty())
                .collect();
            assert_eq!(part.pieces(all.clone()).collect::<Vec<_>>(), expected);
            assert!(part.is_written(&inner));
            part.zero(inner).unwrap();
            assert_eq!(
                part.pieces(all.clone()).collect::<Vec<_>>(),
                [(false, all.clone())]
            );
        }
    }

    #[test]
    fn only_files_of_parts_are_parts() {
        let part = Part::new(0, 100_000).unwrap();
        let files = || part.files().map(|file| file.try_clone_to_owned().unwrap());
        let of = |range: Range<u64>, [bytes, written]: [OwnedFd; 2]| {
            Part::of(range, bytes, written).is_ok()
        };
        assert!(of(part.range.clone(), files()));
        for range in [
            0..0,
            0..PAGE,
            0..part.range.end + PAGE,
            1..part.range.end + 1,
        ] {
            assert!(!of(range.clone(), files()), "{range:?}");
        }
        let [bytes, written] = files();
        assert!(!of(part.range.clone(), [written, bytes]));
        let long = tempfile::tempfile().unwrap();
        long.set_len(part.range.end).unwrap();
        assert!(!of(
            part.range.clone(),
            [long.into(), files()[1].try_clone().unwrap()]
        ));
    }
}
