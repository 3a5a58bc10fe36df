//! Data memory of a connection: bounded, and aligned to pages, so that files opened for direct I/O
//! need no copy.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;

pub(super) const PAGE: usize = 4096;

/// Size of the largest span in bytes: 64 pages, the number of bits in a word.
pub(super) const BLOCK: usize = 64 * PAGE;

/// Consecutive pages of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    page: u32,
    pages: u32,
}

impl Span {
    /// Encodes the span as a request's cookie.
    pub(super) fn to_u64(self) -> u64 {
        u64::from(self.pages) << 32 | u64::from(self.page)
    }

    pub(super) fn from_u64(cookie: u64) -> Span {
        Span {
            page: cookie as u32,
            pages: (cookie >> 32) as u32,
        }
    }

    /// Returns the span of a whole block.
    pub(super) fn whole(block: usize) -> Span {
        Span {
            page: block as u32 * 64,
            pages: 64,
        }
    }

    /// Returns the number of the block that contains the span.
    pub(super) fn block(self) -> usize {
        self.page as usize / 64
    }

    fn mask(self) -> u64 {
        mask(self.pages) << (self.page % 64)
    }
}

/// Returns a mask of the lowest `pages` bits.
fn mask(pages: u32) -> u64 {
    u64::MAX >> (64 - pages)
}

/// Pages of memory, allocated from the lowest block that has them free. A connection with little in
/// flight thus uses little memory, which stays in the CPU's cache.
pub(super) struct Pool {
    base: *mut u8,
    /// A word per block, with a bit set for each free page.
    free: Vec<u64>,
    free_pages: usize,
    /// Index of the first block that may have free pages.
    first: usize,
}

// SAFETY: the mapping belongs to this value and lives as long.
unsafe impl Send for Pool {}

impl Pool {
    /// Creates a pool of `bytes`, rounded up to whole blocks. The kernel allocates pages at their
    /// first use.
    pub(super) fn new(bytes: usize) -> io::Result<Pool> {
        let blocks = bytes.div_ceil(BLOCK);
        // SAFETY: this is a new mapping at an address that the kernel chooses.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                blocks * BLOCK,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Pool {
            base: base.cast(),
            free: vec![u64::MAX; blocks],
            free_pages: blocks * 64,
            first: 0,
        })
    }

    pub(super) fn blocks(&self) -> usize {
        self.free.len()
    }

    /// Allocates room for `bytes`, 1 to [`BLOCK`].
    #[inline]
    pub(super) fn take(&mut self, bytes: usize) -> Option<Span> {
        let pages = bytes.div_ceil(PAGE) as u32;
        debug_assert!((1..=64).contains(&pages));
        while self.free.get(self.first) == Some(&0) {
            self.first += 1;
        }
        for (block, free) in self.free.iter_mut().enumerate().skip(self.first) {
            if let Some(shift) = find(*free, pages) {
                *free &= !(mask(pages) << shift);
                self.free_pages -= pages as usize;
                let page = block as u32 * 64 + shift;
                return Some(Span { page, pages });
            }
        }
        None
    }

    /// Allocates room for `bytes` in spans of whole blocks; the last span may be shorter. Returns
    /// false, with nothing allocated, if there is not enough.
    pub(super) fn take_all(&mut self, bytes: usize, spans: &mut Vec<Span>) -> bool {
        debug_assert!(spans.is_empty());
        if self.free_pages * PAGE < bytes {
            return false;
        }
        for at in (0..bytes).step_by(BLOCK) {
            let Some(span) = self.take(BLOCK.min(bytes - at)) else {
                spans.drain(..).for_each(|span| self.put(span));
                return false;
            };
            spans.push(span);
        }
        true
    }

    #[inline]
    pub(super) fn put(&mut self, span: Span) {
        let block = span.block();
        debug_assert!(self.free[block] & span.mask() == 0, "put twice");
        self.free[block] |= span.mask();
        self.free_pages += span.pages as usize;
        self.first = self.first.min(block);
    }

    /// Returns the address of a span.
    #[inline]
    pub(super) fn at(&self, span: Span) -> *mut u8 {
        // SAFETY: spans lie within the mapping.
        unsafe { self.base.add(span.page as usize * PAGE) }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn used(&self) -> usize {
        (self.blocks() * 64 - self.free_pages) * PAGE
    }
}

/// Finds the lowest run of `pages` set bits whose start is a multiple of the next power of two.
#[inline]
fn find(free: u64, pages: u32) -> Option<u32> {
    if pages == 1 {
        return (free != 0).then(|| free.trailing_zeros());
    }
    let wanted = mask(pages);
    let step = pages.next_power_of_two() as usize;
    (0..64)
        .step_by(step)
        .map(|shift| shift as u32)
        .find(|shift| free >> shift & wanted == wanted)
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and no pointer into it is used any more.
        let unmapped = unsafe { munmap(self.base.cast(), self.blocks() * BLOCK) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_spans_fill_a_block_before_the_next_is_used() {
        let mut pool = Pool::new(3 * BLOCK).unwrap();
        let small: Vec<_> = (0..64).map(|_| pool.take(PAGE).unwrap()).collect();
        assert!(small.iter().all(|span| span.block() == 0));
        let whole = pool.take(BLOCK).unwrap();
        assert_eq!(whole.block(), 1);
        pool.put(small[17]);
        assert_eq!(pool.take(100), Some(small[17]));
        assert_eq!(pool.take(BLOCK).unwrap().block(), 2);
        assert_eq!(pool.take(1), None);
    }

    proptest! {
        #[test]
        fn spans_never_overlap(sizes in prop::collection::vec(1..=BLOCK, 1..60)) {
            let mut pool = Pool::new(4 * BLOCK).unwrap();
            let mut held: Vec<Span> = Vec::new();
            for size in sizes {
                match pool.take(size) {
                    Some(span) => {
                        let bytes = span.pages as usize * PAGE;
                        prop_assert!(bytes >= size && bytes < size + PAGE);
                        let ends = |s: &Span| (s.page, s.page + s.pages);
                        let (start, end) = ends(&span);
                        prop_assert!(held.iter().all(|h| ends(h).1 <= start || ends(h).0 >= end));
                        prop_assert_eq!(Span::from_u64(span.to_u64()), span);
                        held.push(span);
                    }
                    None => pool.put(held.swap_remove(size % held.len())),
                }
            }
            held.drain(..).for_each(|span| pool.put(span));
            prop_assert_eq!(pool.used(), 0);
            prop_assert!(pool.take_all(4 * BLOCK - 1, &mut held));
            let mut more = Vec::new();
            prop_assert!(!pool.take_all(1, &mut more) && more.is_empty());
        }
    }
}
