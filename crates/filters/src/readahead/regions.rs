//! Who may have changed what was read before.

use std::sync::atomic::{AtomicU64, Ordering};

const REGION_BITS: u32 = 20;
const COUNT: u64 = 1024;

/// For each MiB of the disk (many share one) how many writes are under way
/// there, in the low half, and how many have ended, in the high half: whoever
/// finds the same number again, and nothing under way, knows that nothing was
/// written meanwhile.
pub(super) struct Regions(Box<[AtomicU64]>);

const ENDED: u64 = 1 << 32;

/// What [`Regions::look`] has seen; for a few regions.
pub(super) type Seen = u64;

impl Regions {
    pub(super) fn new() -> Regions {
        Regions((0..COUNT).map(|_| AtomicU64::new(0)).collect())
    }

    fn of(&self, offset: u64, len: u64) -> impl Iterator<Item = &AtomicU64> {
        let first = offset >> REGION_BITS;
        let last = offset.saturating_add(len.saturating_sub(1)) >> REGION_BITS;
        let n = (last - first + 1).min(COUNT);
        (first..first + n).map(|region| &self.0[(region % COUNT) as usize])
    }

    pub(super) fn begin_write(&self, offset: u64, len: u64) {
        for region in self.of(offset, len) {
            region.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn end_write(&self, offset: u64, len: u64) {
        // The carry out of the low half cannot be: it counts one at least.
        for region in self.of(offset, len) {
            region.fetch_add(ENDED - 1, Ordering::SeqCst);
        }
    }

    /// None while something is being written. Each region's number only
    /// grows then, so their sum tells of a change in any.
    pub(super) fn look(&self, offset: u64, len: u64) -> Option<Seen> {
        let mut sum: u64 = 0;
        for region in self.of(offset, len) {
            let value = region.load(Ordering::SeqCst);
            if value % ENDED != 0 {
                return None;
            }
            sum = sum.wrapping_add(value);
        }
        Some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_shows_while_it_is_under_way_and_ever_after() {
        let regions = Regions::new();
        let mib = 1 << REGION_BITS;
        let before = regions.look(0, 2 * mib);
        assert!(before.is_some());
        regions.begin_write(2 * mib - 512, 1024);
        assert_eq!(regions.look(0, 2 * mib), None);
        assert_eq!(regions.look(2 * mib, 512), None);
        assert!(regions.look(0, mib).is_some());
        regions.end_write(2 * mib - 512, 1024);
        let after = regions.look(0, 2 * mib);
        assert!(after.is_some() && after != before);
        regions.begin_write(0, u64::MAX);
        assert_eq!(regions.look(77 * mib, 512), None);
    }
}
