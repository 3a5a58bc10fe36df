//! Refcount table entries, and refcount blocks of all widths.

use super::bytes::{put_u32, put_u64, u16_at, u32_at, u64_at};
use super::{EntryError, Geometry};
use crate::HostOffset;

/// Bits of a refcount table entry that must be 0.
const RESERVED: u64 = 0x1ff;

/// An entry of the refcount table: the place of a refcount block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableEntry(pub u64);

impl TableEntry {
    /// Size of an entry in bytes.
    pub const SIZE: u64 = 8;

    /// Returns the start of the refcount block, or `None` if all refcounts of the block are 0.
    pub fn block(self, geometry: &Geometry) -> Result<Option<HostOffset>, EntryError> {
        let offset = HostOffset(self.0);
        if self.0 & RESERVED != 0 {
            return Err(EntryError::ReservedBits(self.0));
        }
        if !geometry.is_aligned(offset) {
            return Err(EntryError::Unaligned(offset));
        }
        Ok((self.0 != 0).then_some(offset))
    }
}

/// Size of a new refcount table, for a block number that the current table has no entry for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongerTable {
    /// Number of new refcount blocks, from the missing one on. The blocks count themselves and the
    /// table.
    pub blocks: u64,
    /// Number of clusters of the new table, which follows the blocks.
    pub clusters: u64,
}

impl LongerTable {
    /// Computes the new table for block `number`, when the table has `entries` entries. The new
    /// table has at least twice as many entries, and enough for the blocks that it and they need.
    pub fn new(g: &Geometry, number: u64, entries: u64) -> LongerTable {
        let per_cluster = g.cluster_size() / TableEntry::SIZE;
        let mut blocks = 1;
        loop {
            let clusters = (number + blocks).max(2 * entries).div_ceil(per_cluster);
            let needed = (blocks + clusters).div_ceil(g.refcount_block_entries());
            if needed <= blocks {
                return LongerTable { blocks, clusters };
            }
            blocks = needed;
        }
    }
}

/// Number of clusters of an image, and the share of its refcount structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// All clusters, including the header.
    pub clusters: u64,
    /// Number of refcount blocks.
    pub blocks: u64,
    /// Number of clusters of the refcount table.
    pub table_clusters: u64,
}

impl Extent {
    /// Returns the extent after `more` clusters have been allocated at the end of the image. A
    /// refcount block is added whenever the last one is full, and a longer refcount table whenever
    /// the table is full. The clusters of former tables still count, because they may not be
    /// reused.
    pub fn grown(mut self, g: &Geometry, mut more: u64) -> Extent {
        let entries = g.refcount_block_entries();
        let per_cluster = g.cluster_size() / TableEntry::SIZE;
        loop {
            let free = (self.blocks * entries).saturating_sub(self.clusters);
            self.clusters += more.min(free);
            more -= more.min(free);
            let table = self.table_clusters * per_cluster;
            match more {
                0 => return self,
                _ if self.blocks < table => {
                    // Each block counts itself, too.
                    let blocks = more.div_ceil(entries - 1).min(table - self.blocks);
                    let counted = more.min(blocks * (entries - 1));
                    self.blocks += blocks;
                    self.clusters += blocks + counted;
                    more -= counted;
                }
                _ => {
                    let longer = LongerTable::new(g, self.blocks, table);
                    self.blocks += longer.blocks;
                    self.clusters += longer.blocks + longer.clusters;
                    self.table_clusters = longer.clusters;
                }
            }
        }
    }
}

/// Returns refcount number `index` of a block. `order` is log2 of the width in bits. Widths below 8
/// bits count from the least significant bit of each byte.
#[inline]
pub fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..=2 => {
            let bits = 1 << order;
            let at = index << order;
            u64::from(block[at / 8]) >> (at % 8) & ((1 << bits) - 1)
        }
        3 => block[index].into(),
        4 => u16_at(block, index * 2).into(),
        5 => u32_at(block, index * 4).into(),
        _ => u64_at(block, index * 8),
    }
}

/// Sets refcount number `index` of a block. `value` must fit the width.
#[inline]
pub fn set(block: &mut [u8], order: u32, index: usize, value: u64) {
    debug_assert!(value <= u64::MAX >> (64 - (1 << order)));
    match order {
        0..=2 => {
            let mask = (1u8 << (1 << order)).wrapping_sub(1);
            let at = index << order;
            let byte = &mut block[at / 8];
            *byte = *byte & !(mask << (at % 8)) | (value as u8) << (at % 8);
        }
        3 => block[index] = value as u8,
        4 => block[index * 2..index * 2 + 2].copy_from_slice(&(value as u16).to_be_bytes()),
        5 => put_u32(block, index * 4, value as u32),
        _ => put_u64(block, index * 8, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_widths_keep_their_neighbours() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1 << order));
            let mut block = vec![0; 512];
            let entries = (512 * 8) >> order;
            for i in 0..entries {
                set(&mut block, order, i, (i as u64 * 7 + 1) & max);
            }
            set(&mut block, order, 5, max);
            set(&mut block, order, 6, 0);
            for i in (0..entries).filter(|i| *i != 5 && *i != 6) {
                assert_eq!(get(&block, order, i), (i as u64 * 7 + 1) & max, "{order}");
            }
            assert_eq!(get(&block, order, 5), max);
            assert_eq!(get(&block, order, 6), 0);
        }
        // Widths below 8 bits start at the least significant bit.
        assert_eq!(get(&[0b0000_0100], 0, 2), 1);
        assert_eq!(get(&[0x21], 2, 1), 2);
    }

    #[test]
    fn table_entries_are_offsets_of_clusters() {
        let g = Geometry {
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            data_file: false,
            version: 3,
        };
        assert_eq!(TableEntry(0).block(&g), Ok(None));
        assert_eq!(TableEntry(0x20000).block(&g), Ok(Some(HostOffset(0x20000))));
        assert!(TableEntry(0x20001).block(&g).is_err());
        assert!(TableEntry(0x20200).block(&g).is_err());
    }
}
