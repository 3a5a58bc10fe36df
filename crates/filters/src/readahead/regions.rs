//! Detects writes to ranges that were read before.

use std::sync::atomic::{AtomicU64, Ordering};

const REGION_BITS: u32 = 20;
const COUNT: u64 = 1024;

/// Counters for each MiB of the disk; distant MiBs share one. The low half is the number of writes
/// in flight, the high half the number of completed writes. If the value is unchanged and no write
/// is in flight, nothing was written in the meantime.
pub(super) struct Regions(Box<[AtomicU64]>);

const ENDED: u64 = 1 << 32;

/// The result of [`Regions::look`], for a few regions.
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
        // The carry goes into the high half and never out of the low one: `begin_write` has added 1
        // before.
        for region in self.of(offset, len) {
            region.fetch_add(ENDED - 1, Ordering::SeqCst);
        }
    }

    /// Returns the state of the range; none while a write is in flight. Each region's value only
    /// grows, so a change in any region changes the sum.
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
