//! Tracks the blocks of a disk in use that have not arrived yet.

use crate::blocks::grid_of;
use crate::notifiers::Notifiers;
use fathom_core::blocks::{BITS, Grid, are_set, bits, unset};
use fathom_core::{EventNotifier, Op};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Maximum bytes per turn that are copied for one waiting request, and for all of them.
const OF_ONE: u64 = 1 << 20;
const AT_ONCE: u64 = 4 << 20;

/// The blocks of a disk for which users must wait. None is missing before [`Missing::begin`].
///
/// A present block may be read. A block that is also recorded may be changed: even after a crash
/// it is not copied again over the changes.
#[derive(Default)]
pub struct Missing {
    map: OnceLock<Map>,
    waits: Mutex<Waits>,
    /// Signalled when a request begins to wait.
    news: Condvar,
    /// Whether the job cannot copy blocks at the moment.
    hopeless: AtomicBool,
    /// Number of times that all waiting requests have been forgotten.
    forgotten: AtomicU64,
    notifiers: Notifiers,
}

struct Map {
    grid: Grid,
    here: Box<[AtomicU64]>,
    noted: Box<[AtomicU64]>,
    /// Number of blocks that are not recorded.
    left: AtomicU64,
}

/// Blocks for which requests wait, in order of arrival.
#[derive(Default)]
struct Waits(Vec<Want>);

struct Want {
    blocks: Range<u64>,
    writes: bool,
}

impl Map {
    /// Returns whether the request may be submitted now.
    fn lets(&self, op: Op, offset: u64, len: u64) -> bool {
        match op {
            Op::Flush => true,
            Op::Read | Op::BlockStatus => are_set(&self.here, self.grid.touched(offset, len)),
            Op::Write | Op::Discard | Op::WriteZeroes => {
                are_set(&self.noted, self.grid.touched(offset, len))
            }
        }
    }

    fn is_satisfied(&self, want: &Want) -> bool {
        let words = if want.writes { &self.noted } else { &self.here };
        are_set(words, want.blocks.clone())
    }
}

impl Waits {
    fn pieces(&mut self, map: &Map) -> Vec<Range<u64>> {
        self.0.retain(|want| !map.is_satisfied(want));
        let most = OF_ONE.div_ceil(map.grid.block());
        let (mut pieces, mut left) = (Vec::new(), AT_ONCE.div_ceil(map.grid.block()));
        for want in &self.0 {
            let Some(absent) = unset(&map.here, want.blocks.clone()) else {
                continue;
            };
            let len = (absent.end - absent.start).min(most).min(left);
            pieces.push(map.grid.bytes(absent.start..absent.start + len));
            left -= len;
            if left == 0 {
                break;
            }
        }
        pieces
    }
}

impl Missing {
    /// Marks all blocks as missing, except those in `words`, which are recorded.
    ///
    /// `words` has the length [`words_of`](crate::words_of) for the disk's size. Called once,
    /// before the disk is used.
    pub fn begin(&self, size: u64, words: &[u64]) {
        let grid = grid_of(size);
        let blocks = grid.count();
        // Bits beyond the end of the disk are ignored.
        let of_word = |n: usize| blocks.saturating_sub(n as u64 * BITS).min(BITS);
        let mask = |n: usize| {
            u64::MAX
                .checked_shr((BITS - of_word(n)) as u32)
                .unwrap_or(0)
        };
        let words = words.iter().enumerate().map(|(n, word)| word & mask(n));
        let load = || words.clone().map(AtomicU64::new).collect();
        let noted: u64 = words.clone().map(|word| u64::from(word.count_ones())).sum();
        let map = Map {
            grid,
            here: load(),
            noted: load(),
            left: AtomicU64::new(blocks - noted),
        };
        let is_first = self.map.set(map).is_ok();
        debug_assert!(is_first);
    }

    /// Returns whether the request may be submitted now.
    #[inline]
    pub(crate) fn lets(&self, op: Op, offset: u64, len: u64) -> bool {
        match self.map.get() {
            None => true,
            Some(map) => map.left.load(Ordering::Acquire) == 0 || map.lets(op, offset, len),
        }
    }

    /// Registers a waiting request; its worker checks again when its eventfd is signalled.
    pub(crate) fn want(&self, op: Op, offset: u64, len: u64) {
        let Some(map) = self.map.get() else { return };
        let want = Want {
            blocks: map.grid.touched(offset, len),
            writes: op != Op::Read,
        };
        self.waits.lock().0.push(want);
        self.news.notify_all();
    }

    /// Returns an eventfd that is signalled when waiting requests must be checked again.
    pub(crate) fn listen(&self) -> io::Result<Arc<EventNotifier>> {
        let notifier = Arc::new(EventNotifier::new()?);
        self.notifiers.add(&notifier);
        Ok(notifier)
    }

    pub(crate) fn is_hopeless(&self) -> bool {
        self.hopeless.load(Ordering::SeqCst)
    }

    /// Sets whether no blocks arrive at the moment.
    ///
    /// Requests that must not wait fail then. All others are registered again.
    pub fn set_hopeless(&self, hopeless: bool) {
        if self.hopeless.swap(hopeless, Ordering::SeqCst) != hopeless {
            self.waits.lock().0.clear();
            self.forgotten.fetch_add(1, Ordering::SeqCst);
            self.notifiers.notify();
        }
    }

    /// Returns a number that changes when all waiting requests have been forgotten.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::SeqCst)
    }

    /// Returns missing ranges for which requests wait, in bytes and whole blocks.
    ///
    /// The result has some ranges of each request, a few megabytes in total. If no request waits,
    /// the function waits for one for the time `within` at most.
    pub fn wanted(&self, within: Duration) -> Vec<Range<u64>> {
        let Some(map) = self.map.get() else {
            return Vec::new();
        };
        let mut waits = self.waits.lock();
        let mut found = waits.pieces(map);
        if found.is_empty() && !within.is_zero() {
            self.news.wait_for(&mut waits, within);
            found = waits.pieces(map);
        }
        found
    }

    /// Returns whether a write waits only for present blocks to be recorded.
    pub fn has_writers(&self) -> bool {
        let Some(map) = self.map.get() else {
            return false;
        };
        let is_here = |want: &Want| are_set(&map.here, want.blocks.clone());
        let mut waits = self.waits.lock();
        waits.0.retain(|want| !map.is_satisfied(want));
        waits.0.iter().any(|want| want.writes && is_here(want))
    }

    /// Returns the missing parts of a range, in bytes and whole blocks.
    pub fn absent(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let Some(map) = self.map.get() else {
            return Vec::new();
        };
        let mut blocks = map
            .grid
            .touched(range.start, range.end.saturating_sub(range.start));
        let mut all = Vec::new();
        while let Some(absent) = unset(&map.here, blocks.clone()) {
            blocks.start = absent.end;
            all.push(map.grid.bytes(absent));
        }
        all
    }

    /// Marks the blocks that lie wholly in this range of bytes as present.
    pub fn have_come(&self, range: Range<u64>) {
        let Some(map) = self.map.get() else { return };
        for (word, mask) in bits(&map.here, map.grid.within(range)) {
            word.fetch_or(mask, Ordering::AcqRel);
        }
        self.notifiers.notify();
    }

    /// Returns the words of the map with blocks to be recorded, with their new values.
    pub fn unnoted(&self) -> Vec<(usize, u64)> {
        let Some(map) = self.map.get() else {
            return Vec::new();
        };
        let words = map.here.iter().zip(&map.noted).enumerate();
        let words = words.map(|(n, (here, noted))| {
            (
                n,
                here.load(Ordering::Acquire),
                noted.load(Ordering::Acquire),
            )
        });
        let new = words.filter(|(_, here, noted)| here != noted);
        new.map(|(n, here, _)| (n, here)).collect()
    }

    /// Marks all blocks as missing again that are present but not recorded, and returns them.
    ///
    /// The ranges are in bytes, in whole blocks.
    pub fn forget_unnoted(&self) -> Vec<Range<u64>> {
        let Some(map) = self.map.get() else {
            return Vec::new();
        };
        let mut gone = Vec::new();
        for (n, (here, noted)) in (0..).zip(map.here.iter().zip(&map.noted)) {
            let noted = noted.load(Ordering::Acquire);
            let mut lost = here.swap(noted, Ordering::AcqRel) & !noted;
            while lost != 0 {
                let block = n * BITS + u64::from(lost.trailing_zeros());
                gone.push(map.grid.bytes(block..block + 1));
                lost &= lost - 1;
            }
        }
        if !gone.is_empty() {
            // A waiting request may have been dropped from the list because its block was present.
            self.forgotten.fetch_add(1, Ordering::SeqCst);
            self.notifiers.notify();
        }
        gone
    }

    /// Returns whether all blocks are recorded.
    pub fn is_whole(&self) -> bool {
        let map = self.map.get();
        map.is_none_or(|map| map.left.load(Ordering::Acquire) == 0)
    }

    /// Marks the blocks in these words as recorded.
    pub fn are_noted(&self, words: &[(usize, u64)]) {
        let Some(map) = self.map.get() else { return };
        let mut new = 0;
        for (n, word) in words {
            let before = map.noted[*n].fetch_or(*word, Ordering::AcqRel);
            new += u64::from((word & !before).count_ones());
        }
        map.left.fetch_sub(new, Ordering::AcqRel);
        self.notifiers.notify();
    }

    /// Returns the number of missing bytes, in whole blocks.
    pub fn left(&self) -> u64 {
        self.map.get().map_or(0, |map| {
            let here = map.here.iter().map(|word| word.load(Ordering::Acquire));
            let here: u64 = here.map(|word| u64::from(word.count_ones())).sum();
            map.grid.count().saturating_sub(here) * map.grid.block()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{SMALLEST, words_of};

    const BLOCK: u64 = SMALLEST;

    fn of_blocks(blocks: u64, noted: &[u64]) -> Missing {
        let missing = Missing::default();
        let mut words = vec![0; words_of(blocks * BLOCK)];
        noted
            .iter()
            .for_each(|n| words[(n / BITS) as usize] |= 1 << (n % BITS));
        missing.begin(blocks * BLOCK - 512, &words);
        missing
    }

    fn note(missing: &Missing) {
        let words = missing.unnoted();
        missing.are_noted(&words);
    }

    #[test]
    fn what_is_here_is_read_and_what_is_noted_is_written() {
        let missing = of_blocks(130, &[3]);
        let lets = |op, block: u64, len| missing.lets(op, block * BLOCK + 512, len);
        assert!(lets(Op::Read, 3, 512) && lets(Op::Write, 3, 512) && lets(Op::Flush, 9, 0));
        assert!(!lets(Op::Read, 3, BLOCK) && !lets(Op::Read, 129, 512));
        missing.have_come(4 * BLOCK..5 * BLOCK + 1);
        assert!(lets(Op::Read, 3, BLOCK) && !lets(Op::Read, 4, BLOCK));
        assert!(!lets(Op::Write, 4, 512) && !lets(Op::Discard, 3, BLOCK));
        note(&missing);
        assert!(lets(Op::Write, 3, BLOCK) && lets(Op::WriteZeroes, 4, 512));
        assert_eq!(missing.left(), 128 * BLOCK);
        missing.have_come(0..u64::MAX);
        assert!(lets(Op::Read, 129, 512) && !lets(Op::Write, 129, 512));
        note(&missing);
        assert!(lets(Op::Write, 0, 130 * BLOCK));
        assert_eq!((missing.left(), missing.unnoted()), (0, vec![]));
    }

    #[test]
    fn nothing_is_missing_of_a_disk_that_is_here() {
        let missing = Missing::default();
        assert!(missing.lets(Op::Write, 0, u64::MAX));
        assert_eq!(missing.wanted(Duration::ZERO), []);
    }

    #[test]
    fn all_who_wait_are_served_and_in_pieces() {
        let missing = of_blocks(1000, &[]);
        missing.want(Op::Write, 10 * BLOCK, 100 * BLOCK);
        missing.want(Op::Read, 5 * BLOCK + 7, 1);
        let next = || missing.wanted(Duration::ZERO);
        assert_eq!(next(), [10 * BLOCK..26 * BLOCK, 5 * BLOCK..6 * BLOCK]);
        next()
            .into_iter()
            .for_each(|piece| missing.have_come(piece));
        assert_eq!(next().pop(), Some(26 * BLOCK..42 * BLOCK));
        assert!(!missing.has_writers());
        missing.have_come(0..110 * BLOCK);
        // All blocks of the first request are present; the request waits for the record.
        assert!(missing.has_writers());
        assert_eq!(next(), []);
        note(&missing);
        assert!(!missing.has_writers());
        let last = |from: u64, to: u64| missing.absent(from..to).pop();
        assert_eq!(
            last(100 * BLOCK, 112 * BLOCK),
            Some(110 * BLOCK..112 * BLOCK)
        );
        let end = 1000 * BLOCK - 512;
        assert_eq!(last(990 * BLOCK, u64::MAX), Some(990 * BLOCK..end));
        let many = (0..100).map(|n| missing.want(Op::Read, (200 + 2 * n) * BLOCK, 1));
        assert_eq!(many.count(), 100);
        assert_eq!(next().len(), 64);
    }

    #[test]
    fn what_is_not_noted_can_be_taken_back() {
        let missing = of_blocks(70, &[1]);
        missing.have_come(0..2 * BLOCK);
        missing.have_come(69 * BLOCK..u64::MAX);
        assert_eq!(
            missing.forget_unnoted(),
            [0..BLOCK, 69 * BLOCK..70 * BLOCK - 512]
        );
        assert!(missing.lets(Op::Write, BLOCK, 1) && !missing.lets(Op::Read, 0, 1));
        assert_eq!((missing.unnoted(), missing.left()), (vec![], 69 * BLOCK));
    }

    /// The map may come from an untrusted source.
    #[test]
    fn bits_behind_the_end_mean_nothing() {
        let missing = Missing::default();
        missing.begin(3 * BLOCK, &[u64::MAX - 1]);
        assert_eq!(missing.left(), BLOCK);
        assert!(!missing.is_whole() && !missing.lets(Op::Read, 0, 1));
        missing.have_come(0..BLOCK);
        note(&missing);
        assert!(missing.is_whole());
    }
}
