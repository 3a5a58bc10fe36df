//! Sizes and indexes that follow from the header.

use crate::{GuestOffset, HostOffset};

/// The few header fields that determine sizes and indexes, small enough to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// log2 of the cluster size in bytes: 9 to 21.
    pub cluster_bits: u32,
    /// log2 of a refcount's width in bits: 0 to 6.
    pub refcount_order: u32,
    /// Whether L2 entries have 16 bytes and clusters have 32 subclusters.
    pub extended_l2: bool,
    /// Whether guest data is in an external data file, which has no refcounts.
    pub data_file: bool,
    /// Version of the format: 2 or 3.
    pub version: u32,
}

impl Geometry {
    /// Cluster size in bytes.
    #[inline]
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Subcluster size in bytes; the cluster size if the image has no subclusters.
    #[inline]
    pub fn subcluster_size(&self) -> u64 {
        self.cluster_size() >> if self.extended_l2 { 5 } else { 0 }
    }

    /// Size of an L2 entry in bytes: 8 or 16.
    #[inline]
    pub fn l2_entry_size(&self) -> u64 {
        8 << u32::from(self.extended_l2)
    }

    /// log2 of the number of entries in an L2 table, which is one cluster.
    #[inline]
    pub fn l2_bits(&self) -> u32 {
        self.cluster_bits - 3 - u32::from(self.extended_l2)
    }

    /// Number of entries of an L2 table.
    #[inline]
    pub fn l2_entries(&self) -> u64 {
        1 << self.l2_bits()
    }

    /// Index of a guest offset in the L1 table.
    #[inline]
    pub fn l1_index(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.cluster_bits + self.l2_bits())
    }

    /// Index of a guest offset in its L2 table.
    #[inline]
    pub fn l2_index(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.cluster_bits) & (self.l2_entries() - 1)
    }

    /// Number of L1 entries that a disk of `size` bytes needs.
    pub fn l1_entries_for(&self, size: u64) -> u64 {
        size.div_ceil(1 << (self.cluster_bits + self.l2_bits()))
    }

    /// Whether `offset` is the start of a cluster.
    #[inline]
    pub fn is_aligned(&self, offset: HostOffset) -> bool {
        offset.within(self.cluster_size()) == 0
    }

    /// Number of clusters that `bytes` bytes need, rounded up.
    #[inline]
    pub fn clusters_of(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// Width of a refcount in bits: 1 to 64.
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Largest value of a refcount.
    pub fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// log2 of the number of refcounts in a refcount block, which is one cluster.
    #[inline]
    pub fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Number of refcounts in a refcount block.
    #[inline]
    pub fn refcount_block_entries(&self) -> u64 {
        1 << self.refcount_block_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specifications_numbers_come_out() {
        let g = Geometry {
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            data_file: false,
            version: 3,
        };
        assert_eq!(g.l2_entries(), 8192);
        assert_eq!(g.refcount_block_entries(), 32768);
        assert_eq!(g.refcount_max(), 65535);
        assert_eq!(g.l1_entries_for(512 << 20), 1);
        assert_eq!(g.l1_entries_for((512 << 20) + 1), 2);
        let guest = GuestOffset(513 << 20);
        assert_eq!((g.l1_index(guest), g.l2_index(guest)), (1, 16));
        let extended = Geometry {
            extended_l2: true,
            refcount_order: 6,
            ..g
        };
        assert_eq!(extended.l2_entries(), 4096);
        assert_eq!(extended.subcluster_size(), 2048);
        assert_eq!(extended.refcount_max(), u64::MAX);
    }
}
