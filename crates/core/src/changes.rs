//! Tracks which parts of a disk have changed, for a reader that copies them.

use crate::blocks::{BITS, Grid, block_size, masks, unset_words, words_for};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Smallest block size, in bytes.
const SMALLEST: u64 = 4096;

/// Maximum number of words that one `take` examines, so that its caller is not delayed.
const MOST_WORDS: usize = 4096;

/// A bit for each block of a disk: the block has changed since the bit was last taken.
///
/// The reader takes a bit first and reads the block afterwards, so it sees the change that set the
/// bit. A write in the meantime sets the bit again. Any number of threads may mark blocks; only one
/// may take bits.
#[derive(Debug)]
pub struct Changes {
    grid: Grid,
    words: Box<[AtomicU64]>,
    /// A bit for each word that may be non-zero.
    summary: Box<[AtomicU64]>,
    /// A change beyond `size` was marked: the disk has grown.
    outgrown: AtomicBool,
}

/// A range of bytes that have all changed or all not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Length of the range in bytes.
    pub len: u64,
    /// Whether the bytes have changed since their bits were last taken.
    pub changed: bool,
}

impl Changes {
    /// Creates the map of an unchanged disk of `size` bytes.
    pub fn new(size: u64) -> Changes {
        let grid = Grid::new(size, block_size(size, SMALLEST));
        Changes {
            grid,
            words: unset_words(grid.count()),
            summary: unset_words(words_for(grid.count()) as u64),
            outgrown: AtomicBool::new(false),
        }
    }

    /// Returns the size in bytes of the disk at the time when the map was created.
    pub fn size(&self) -> u64 {
        self.grid.size
    }

    /// Returns the block size in bytes: the bytes that share a bit.
    pub fn block(&self) -> u64 {
        self.grid.block()
    }

    /// Returns whether a change beyond [`Changes::size`] was marked, because the disk has grown.
    pub fn is_outgrown(&self) -> bool {
        self.outgrown.load(Ordering::Relaxed)
    }

    /// Marks these bytes as changed.
    #[inline]
    pub fn mark(&self, offset: u64, len: u64) {
        if offset.saturating_add(len) > self.grid.size {
            self.outgrown.store(true, Ordering::Relaxed);
        }
        for (word, mask) in masks(self.grid.touched(offset, len)) {
            self.set(word, mask);
        }
    }

    #[inline]
    fn set(&self, word: usize, bits: u64) {
        // If the bits are set already, the reader takes them after this load and reads the blocks
        // after that.
        let add = |to: &AtomicU64, bits: u64| {
            if to.load(Ordering::SeqCst) & bits != bits {
                to.fetch_or(bits, Ordering::SeqCst);
            }
        };
        // The word comes first, because the reader checks the summary before the word.
        add(&self.words[word], bits);
        let (at, bit) = (word / BITS as usize, word % BITS as usize);
        add(&self.summary[at], 1 << bit);
    }

    /// Takes the bits of `range`, whose start must be at a block boundary. May stop before the end
    /// of the range: after about `most` runs, or after `MOST_WORDS` words that may contain changes
    /// (1 GiB at the smallest block size). The runs are contiguous and begin at `range.start`.
    /// Returns none only if the range is empty.
    pub fn take(&self, range: Range<u64>, most: usize) -> Vec<Run> {
        let end = range.end.min(self.grid.size);
        let mut runs = Runs::default();
        let (mut at, mut words) = (range.start, 0);
        while at < end && runs.0.len() < most && words < MOST_WORDS {
            let block = at / self.block();
            let (word, bit) = (block / BITS, block % BITS);
            let whole = bit == 0 && end - at >= self.bytes(BITS);
            if whole && !self.takes_in_summary(word) {
                // Skips as many words as have no bit in the summary.
                let quiet = self.quiet(word, end - at);
                runs.add(self.bytes(quiet * BITS), false);
                at += self.bytes(quiet * BITS);
                continue;
            }
            let count = (BITS - bit).min((end - at).div_ceil(self.block()));
            let mask = (u64::MAX >> (BITS - count)) << bit;
            let word = &self.words[word as usize];
            let bits = word.fetch_and(!mask, Ordering::SeqCst) & mask;
            words += 1;
            if bits == 0 || bits == mask {
                let len = self.bytes(count).min(end - at);
                runs.add(len, bits != 0);
                at += len;
                continue;
            }
            for n in bit..bit + count {
                let len = self.block().min(end - at);
                runs.add(len, bits >> n & 1 == 1);
                at += len;
            }
        }
        runs.0
    }

    /// Returns the number of bytes that [`Changes::take`] would report as changed, in whole blocks.
    pub fn changed_bytes(&self) -> u64 {
        let mut blocks = 0;
        for (n, summary) in self.summary.iter().enumerate() {
            let mut left = summary.load(Ordering::SeqCst);
            while left != 0 {
                let word = n * BITS as usize + left.trailing_zeros() as usize;
                blocks += u64::from(self.words[word].load(Ordering::SeqCst).count_ones());
                left &= left - 1;
            }
        }
        self.bytes(blocks)
    }

    fn bytes(&self, blocks: u64) -> u64 {
        blocks * self.block()
    }

    /// Takes the word's bit from the summary. The caller examines the word afterwards.
    fn takes_in_summary(&self, word: u64) -> bool {
        let bit = 1 << (word % BITS);
        let summary = &self.summary[(word / BITS) as usize];
        summary.load(Ordering::SeqCst) & bit != 0
            && summary.fetch_and(!bit, Ordering::SeqCst) & bit != 0
    }

    /// Counts the words without a bit in the summary, beginning with `word`, which has none.
    /// Returns at least 1 and at most the number of words in `bytes`.
    fn quiet(&self, word: u64, bytes: u64) -> u64 {
        let most = bytes / self.bytes(BITS);
        let mut quiet = 1;
        while quiet < most {
            let next = word + quiet;
            let summary = self.summary[(next / BITS) as usize].load(Ordering::SeqCst);
            let left = summary >> (next % BITS);
            if left != 0 {
                quiet += u64::from(left.trailing_zeros());
                break;
            }
            quiet += BITS - next % BITS;
        }
        quiet.min(most)
    }
}

#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    fn add(&mut self, len: u64, changed: bool) {
        match self.0.last_mut() {
            Some(last) if last.changed == changed => last.len += len,
            _ => self.0.push(Run { len, changed }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicU32;

    /// Takes all bits and returns the changed ranges in bytes.
    fn take_all(changes: &Changes, most: usize) -> Vec<Range<u64>> {
        let (mut at, mut changed) = (0, Vec::<Range<u64>>::new());
        while at < changes.size() {
            let runs = changes.take(at..u64::MAX, most);
            assert!(!runs.is_empty());
            for run in runs {
                if run.changed {
                    match changed.last_mut() {
                        Some(last) if last.end == at => last.end += run.len,
                        _ => changed.push(at..at + run.len),
                    }
                }
                at += run.len;
            }
        }
        assert_eq!(at, changes.size());
        changed
    }

    proptest! {
        /// Each marked block is taken exactly once and as a whole; no other block is taken.
        #[test]
        fn what_is_marked_is_taken(
            size in prop_oneof![1u64..100_000, 1u64..200 << 20],
            marks in prop::collection::vec((any::<prop::sample::Index>(), 1u64..3 << 20), 0..20),
            most in 1usize..8,
        ) {
            let changes = Changes::new(size);
            let mut model = vec![false; size.div_ceil(4096) as usize];
            for (at, len) in marks {
                let at = at.index(size as usize) as u64;
                let len = len.min(size - at);
                changes.mark(at, len);
                model[(at / 4096) as usize..(at + len).div_ceil(4096) as usize].fill(true);
            }
            let mut expected = Vec::<Range<u64>>::new();
            for (n, _) in model.iter().enumerate().filter(|(_, marked)| **marked) {
                let range = n as u64 * 4096..((n as u64 + 1) * 4096).min(size);
                match expected.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => expected.push(range),
                }
            }
            prop_assert!(!changes.is_outgrown());
            let marked = model.iter().filter(|marked| **marked).count() as u64;
            prop_assert_eq!(changes.changed_bytes(), marked * 4096);
            prop_assert_eq!(take_all(&changes, most), expected);
            prop_assert_eq!(take_all(&changes, most), vec![]);
        }
    }

    #[test]
    fn large_disks_have_large_blocks() {
        assert_eq!(Changes::new(1 << 40).block(), 4096);
        let changes = Changes::new((1 << 40) + 1);
        assert_eq!(changes.block(), 8192);
        changes.mark(1 << 40, 1);
        let last = 1 << 40..(1 << 40) + 1;
        assert_eq!(take_all(&changes, 1), vec![last]);
        changes.mark((1 << 40) - 1, 4);
        assert!(changes.is_outgrown());
    }

    /// The reader sees each version of a block after taking the bit that was set for that version.
    #[test]
    fn nothing_is_missed_that_is_marked_meanwhile() {
        const BLOCKS: usize = 300;
        const ROUNDS: u32 = 20_000;
        let changes = Changes::new(BLOCKS as u64 * 4096);
        let blocks: Vec<_> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
        let mut seen = vec![0; BLOCKS];
        let look = |seen: &mut Vec<u32>| {
            for range in take_all(&changes, 3) {
                for n in range.start / 4096..range.end / 4096 {
                    seen[n as usize] = blocks[n as usize].load(Ordering::SeqCst);
                }
            }
        };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let n = round as usize * 7919 % BLOCKS;
                    blocks[n].store(round, Ordering::SeqCst);
                    changes.mark(n as u64 * 4096, 4096);
                }
            });
            while !writer.is_finished() {
                look(&mut seen);
            }
        });
        look(&mut seen);
        let last: Vec<_> = blocks.iter().map(|b| b.load(Ordering::SeqCst)).collect();
        assert_eq!(seen, last);
    }
}
