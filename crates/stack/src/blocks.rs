//! The blocks into which the maps of jobs and bitmaps divide a disk.

use fathom_core::blocks::{Grid, block_size, words_for};

/// Minimum size of a block in bytes.
pub(crate) const SMALLEST: u64 = 64 << 10;

/// Returns the block size in bytes for a disk of this size.
pub fn block_of(size: u64) -> u64 {
    block_size(size, SMALLEST)
}

/// Returns the number of words of a map with one bit per block, from the lowest on.
pub fn words_of(size: u64) -> usize {
    words_for(grid_of(size).count())
}

pub(crate) fn grid_of(size: u64) -> Grid {
    Grid::new(size, block_of(size))
}
