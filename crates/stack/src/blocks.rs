//! A disk's blocks, and a bit for each of them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks of a word.
pub(crate) const BITS: u64 = u64::BITS as u64;
/// The smallest block (bytes), and the most that a disk has.
pub(crate) const SMALLEST: u64 = 64 << 10;
const MOST_BLOCKS: u64 = 1 << 28;

/// Bytes of a block, of a disk of this size.
pub fn block_of(size: u64) -> u64 {
    let block = size.div_ceil(MOST_BLOCKS).next_power_of_two();
    block.max(SMALLEST)
}

/// Words of a map, a bit for each block from the lowest on.
pub fn words_of(size: u64) -> usize {
    words_of_blocks(size.div_ceil(block_of(size)))
}

/// Words of so many bits.
pub(crate) fn words_of_blocks(count: u64) -> usize {
    count.div_ceil(BITS) as usize
}

/// Where the blocks of a disk are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) size: u64,
    /// A block has 2 to this power bytes: who looks at each request has no time to divide.
    shift: u32,
}

impl Grid {
    pub(crate) fn new(size: u64) -> Grid {
        Grid::with_block(size, block_of(size))
    }

    /// A power of two.
    pub(crate) fn with_block(size: u64, block: u64) -> Grid {
        let shift = block.trailing_zeros();
        Grid { size, shift }
    }

    pub(crate) fn block(&self) -> u64 {
        1 << self.shift
    }

    pub(crate) fn count(&self) -> u64 {
        self.size.div_ceil(self.block())
    }

    /// The blocks that a range touches.
    #[inline]
    pub(crate) fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        match offset < end {
            true => offset >> self.shift..((end - 1) >> self.shift) + 1,
            false => 0..0,
        }
    }

    /// The blocks that lie wholly in a range (bytes).
    pub(crate) fn within(&self, range: Range<u64>) -> Range<u64> {
        let end = match range.end >= self.size {
            true => self.count(),
            false => range.end >> self.shift,
        };
        range.start.div_ceil(self.block())..end
    }

    pub(crate) fn bytes(&self, blocks: Range<u64>) -> Range<u64> {
        let end = |block: u64| block.saturating_mul(self.block()).min(self.size);
        end(blocks.start)..end(blocks.end)
    }
}

/// The words that have these blocks, and their bits there.
#[inline]
pub(crate) fn bits(
    words: &[AtomicU64],
    blocks: Range<u64>,
) -> impl Iterator<Item = (&AtomicU64, u64)> {
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        (at < blocks.end).then(|| {
            let (word, bit) = (at / BITS, at % BITS);
            let count = (blocks.end - at).min(BITS - bit);
            at += count;
            (&words[word as usize], (u64::MAX >> (BITS - count)) << bit)
        })
    })
}

pub(crate) fn are_set(words: &[AtomicU64], blocks: Range<u64>) -> bool {
    bits(words, blocks).all(|(word, mask)| word.load(Ordering::Acquire) & mask == mask)
}

/// The first of these blocks that are not set, as far as they follow one another.
pub(crate) fn unset(words: &[AtomicU64], blocks: Range<u64>) -> Option<Range<u64>> {
    run(words, blocks, false)
}

/// The first of these blocks that are set, or are not.
pub(crate) fn run(words: &[AtomicU64], blocks: Range<u64>, set: bool) -> Option<Range<u64>> {
    let is = |block: u64| are_set(words, block..block + 1) == set;
    let start = blocks.clone().find(|block| is(*block))?;
    let end = (start..blocks.end).find(|block| !is(*block));
    Some(start..end.unwrap_or(blocks.end))
}
