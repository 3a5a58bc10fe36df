//! Maps with one bit for each block of a disk.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of blocks per word.
pub const BITS: u64 = u64::BITS as u64;

/// Maximum number of blocks of a disk: 32 MiB of bits.
const MOST_BLOCKS: u64 = 1 << 28;

/// Returns the block size in bytes for a disk of this size: `smallest`, a power of two, or more.
pub fn block_size(size: u64, smallest: u64) -> u64 {
    let block = size.div_ceil(MOST_BLOCKS).next_power_of_two();
    block.max(smallest)
}

/// Returns the number of words for `count` bits.
pub fn words_for(count: u64) -> usize {
    count.div_ceil(BITS) as usize
}

/// Division of a disk into blocks.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Binary logarithm of the block size in bytes; shifts avoid divisions for each request.
    shift: u32,
}

impl Grid {
    /// `block`: the block size in bytes, a power of two.
    pub fn new(size: u64, block: u64) -> Grid {
        let shift = block.trailing_zeros();
        Grid { size, shift }
    }

    /// Returns the block size in bytes.
    pub fn block(&self) -> u64 {
        1 << self.shift
    }

    /// Returns the number of blocks.
    pub fn count(&self) -> u64 {
        self.size.div_ceil(self.block())
    }

    /// Returns the blocks that a range touches.
    #[inline]
    pub fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        match offset < end {
            true => offset >> self.shift..((end - 1) >> self.shift) + 1,
            false => 0..0,
        }
    }

    /// Returns the blocks that lie wholly in a range of bytes.
    pub fn within(&self, range: Range<u64>) -> Range<u64> {
        let end = match range.end >= self.size {
            true => self.count(),
            false => range.end >> self.shift,
        };
        range.start.div_ceil(self.block())..end
    }

    /// Returns the bytes of these blocks. The last block of the disk may be short.
    pub fn bytes(&self, blocks: Range<u64>) -> Range<u64> {
        let end = |block: u64| block.saturating_mul(self.block()).min(self.size);
        end(blocks.start)..end(blocks.end)
    }
}

/// Returns the indices of the words that hold these blocks, each with the mask of their bits.
#[inline]
pub fn masks(blocks: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        (at < blocks.end).then(|| {
            let (word, bit) = (at / BITS, at % BITS);
            let count = (blocks.end - at).min(BITS - bit);
            at += count;
            (word as usize, (u64::MAX >> (BITS - count)) << bit)
        })
    })
}

/// Returns the words that hold these blocks, each with the mask of their bits.
#[inline]
pub fn bits(words: &[AtomicU64], blocks: Range<u64>) -> impl Iterator<Item = (&AtomicU64, u64)> {
    masks(blocks).map(|(word, mask)| (&words[word], mask))
}

/// Creates the words for `count` blocks, with no bit set.
pub fn unset_words(count: u64) -> Box<[AtomicU64]> {
    (0..words_for(count)).map(|_| AtomicU64::new(0)).collect()
}

/// Returns whether the bits of all these blocks are set.
pub fn are_set(words: &[AtomicU64], blocks: Range<u64>) -> bool {
    bits(words, blocks).all(|(word, mask)| word.load(Ordering::Acquire) & mask == mask)
}

/// Returns the first run of these blocks whose bits are not set.
pub fn unset(words: &[AtomicU64], blocks: Range<u64>) -> Option<Range<u64>> {
    run(words, blocks, false)
}

/// Returns the first run of these blocks whose bits have the value `set`.
pub fn run(words: &[AtomicU64], blocks: Range<u64>, set: bool) -> Option<Range<u64>> {
    let is = |block: u64| are_set(words, block..block + 1) == set;
    let start = blocks.clone().find(|block| is(*block))?;
    let end = (start..blocks.end).find(|block| !is(*block));
    Some(start..end.unwrap_or(blocks.end))
}
