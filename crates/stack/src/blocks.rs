//! The blocks of a disk, with one bit for each.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of blocks per word.
pub(crate) const BITS: u64 = u64::BITS as u64;
/// Minimum size of a block in bytes, and maximum number of blocks of a disk.
pub(crate) const SMALLEST: u64 = 64 << 10;
const MOST_BLOCKS: u64 = 1 << 28;

/// Returns the block size in bytes for a disk of this size.
pub fn block_of(size: u64) -> u64 {
    let block = size.div_ceil(MOST_BLOCKS).next_power_of_two();
    block.max(SMALLEST)
}

/// Returns the number of words of a map with one bit per block, from the lowest on.
pub fn words_of(size: u64) -> usize {
    words_of_blocks(size.div_ceil(block_of(size)))
}

/// Returns the number of words for `count` bits.
pub(crate) fn words_of_blocks(count: u64) -> usize {
    count.div_ceil(BITS) as usize
}

/// Division of a disk into blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) size: u64,
    /// Binary logarithm of the block size in bytes; shifts avoid divisions for each request.
    shift: u32,
}

impl Grid {
    pub(crate) fn new(size: u64) -> Grid {
        Grid::with_block(size, block_of(size))
    }

    /// Creates a grid with this block size, a power of two.
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

    /// Returns the blocks that a range touches.
    #[inline]
    pub(crate) fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        match offset < end {
            true => offset >> self.shift..((end - 1) >> self.shift) + 1,
            false => 0..0,
        }
    }

    /// Returns the blocks that lie wholly in a range of bytes.
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

/// Returns the words that hold these blocks, each with the mask of their bits.
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

/// Returns the first run of these blocks whose bits are not set.
pub(crate) fn unset(words: &[AtomicU64], blocks: Range<u64>) -> Option<Range<u64>> {
    run(words, blocks, false)
}

/// Returns the first run of these blocks whose bits have the value `set`.
pub(crate) fn run(words: &[AtomicU64], blocks: Range<u64>, set: bool) -> Option<Range<u64>> {
    let is = |block: u64| are_set(words, block..block + 1) == set;
    let start = blocks.clone().find(|block| is(*block))?;
    let end = (start..blocks.end).find(|block| !is(*block));
    Some(start..end.unwrap_or(blocks.end))
}
