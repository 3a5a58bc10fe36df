//! Which pages of a mapping hold anything, as the kernel knows.

use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

pub(super) const PAGE: u64 = 4096;

/// This process's page map (the kernel's admin-guide/mm/pagemap).
pub(super) struct Pages(File);

/// linux/fs.h: struct pm_scan_arg.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// linux/fs.h: struct page_region.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// PAGEMAP_SCAN: _IOWR('f', 16, struct pm_scan_arg), since Linux 6.7.
const SCAN: libc::Ioctl = libc::_IOWR::<ScanArg>(b'f' as u32, 16);
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
/// The page of zeroes that all memory shares which was only read.
const IS_ZERO: u64 = 1 << 5;
const REGIONS: usize = 256;

/// Bits of an entry of the map itself. (It does not tell the page of zeroes.)
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const ENTRIES: usize = 2048;

impl Pages {
    pub(super) fn open() -> Option<Pages> {
        File::open("/proc/self/pagemap").ok().map(Pages)
    }

    /// Calls `each` for the pages of these addresses in order, with whether
    /// they hold anything, until it returns false. Both ends are of pages.
    pub(super) fn look(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(bool, Range<u64>) -> bool,
    ) -> io::Result<()> {
        match self.scan(range.clone(), &mut each) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTTY) => {
                self.read(range, &mut each)
            }
            other => other,
        }
    }

    fn scan(
        &self,
        mut range: Range<u64>,
        each: &mut impl FnMut(bool, Range<u64>) -> bool,
    ) -> io::Result<()> {
        let mut regions = [Region::default(); REGIONS];
        while !range.is_empty() {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: range.start,
                end: range.end,
                vec: regions.as_mut_ptr().expose_provenance() as u64,
                vec_len: REGIONS as u64,
                category_anyof_mask: IS_PRESENT | IS_SWAPPED,
                return_mask: IS_PRESENT | IS_SWAPPED | IS_ZERO,
                ..ScanArg::default()
            };
            // SAFETY: the argument is as the kernel has it, and names memory
            // for as many regions as it says.
            let found = unsafe { libc::ioctl(self.0.as_raw_fd(), SCAN, &raw mut arg) };
            let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
            for region in &regions[..found] {
                let there = region.start.max(range.start)..region.end.min(range.end);
                let has_data = region.categories & IS_ZERO == 0;
                let hole = range.start..there.start;
                if !(hole.is_empty() || each(false, hole)) || !each(has_data, there.clone()) {
                    return Ok(());
                }
                range.start = there.end;
            }
            let walked = arg.walk_end.min(range.end);
            if walked > range.start && !each(false, range.start..walked) {
                return Ok(());
            }
            if arg.walk_end == 0 || (found == 0 && walked <= range.start) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            range.start = range.start.max(walked);
        }
        Ok(())
    }

    fn read(
        &self,
        mut range: Range<u64>,
        each: &mut impl FnMut(bool, Range<u64>) -> bool,
    ) -> io::Result<()> {
        let mut entries = [0; 8 * ENTRIES];
        while !range.is_empty() {
            let n = ENTRIES.min(((range.end - range.start) / PAGE) as usize);
            let known = &mut entries[..8 * n];
            self.0.read_exact_at(known, 8 * (range.start / PAGE))?;
            for entry in known.chunks_exact(8) {
                let entry = u64::from_ne_bytes(entry.try_into().expect("8 bytes"));
                let page = range.start..range.start + PAGE;
                range.start = page.end;
                if !each(entry & (PRESENT | SWAPPED) != 0, page) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    /// Pages in runs of the same kind.
    type Runs = Vec<(bool, u64)>;

    fn runs(look: impl FnOnce(&mut dyn FnMut(bool, Range<u64>) -> bool)) -> Runs {
        let mut runs = Runs::new();
        look(&mut |data, range| {
            let pages = (range.end - range.start) / PAGE;
            match runs.last_mut() {
                Some((last, n)) if *last == data => *n += pages,
                _ => runs.push((data, pages)),
            }
            true
        });
        runs
    }

    #[test]
    fn both_ways_find_what_was_written() {
        let len = 1000 * PAGE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which stays.
        let base = unsafe {
            let hint = std::ptr::null_mut();
            let base = mmap_anonymous(hint, len as usize, protection, flags).unwrap();
            // No huge pages, so that it is known what is there.
            libc::madvise(base, len as usize, libc::MADV_NOHUGEPAGE);
            base.cast::<u8>()
        };
        let start = base.addr() as u64;
        let mut wanted = Runs::new();
        for page in 0..600 {
            // Many short runs: more than one call can tell.
            if page % 2 == 1 {
                // SAFETY: within the mapping.
                unsafe { base.add(page * PAGE as usize).write(1) };
            }
            wanted.push((page % 2 == 1, 1));
        }
        wanted.push((false, 400));
        let pages = Pages::open().unwrap();
        let range = start..start + len;
        let read = runs(|mut each| pages.read(range.clone(), &mut each).unwrap());
        assert_eq!(read, wanted);
        assert_eq!(
            runs(|each| pages.look(range.clone(), each).unwrap()),
            wanted
        );
        let one = runs(|each| pages.look(start + PAGE..start + 2 * PAGE, each).unwrap());
        assert_eq!(one, [(true, 1)]);
    }
}
