//! Entries of L1 and L2 tables, which are offsets.

use crate::{GuestOffset, HostOffset};

/// Sizes that follow from a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// log2 of the cluster size in bytes: 12 to 26.
    pub cluster_bits: u32,
    /// log2 of a table's size in clusters: 0 to 4.
    pub table_clusters_bits: u32,
    /// Bytes before the first table or data cluster.
    pub header_bytes: u64,
}

impl Geometry {
    /// Returns the cluster size in bytes.
    #[inline]
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the bytes of an L1 or L2 table.
    #[inline]
    pub fn table_bytes(&self) -> u64 {
        1 << (self.cluster_bits + self.table_clusters_bits)
    }

    /// Returns log2 of the number of entries in a table.
    #[inline]
    pub fn table_bits(&self) -> u32 {
        self.cluster_bits + self.table_clusters_bits - 3
    }

    /// Returns the number of entries of a table.
    #[inline]
    pub fn table_entries(&self) -> u64 {
        1 << self.table_bits()
    }

    /// Returns the bytes of the largest disk, at most `i64::MAX`.
    pub fn max_size(&self) -> u64 {
        let bits = 2 * self.table_bits() + self.cluster_bits;
        // QEMU and others keep offsets in signed numbers.
        if bits >= 63 {
            i64::MAX as u64
        } else {
            1 << bits
        }
    }

    /// Returns the L1 index of a byte of the guest's disk.
    #[inline]
    pub fn l1_index(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.cluster_bits + self.table_bits())
    }

    /// Returns the L2 index of a byte of the guest's disk.
    #[inline]
    pub fn l2_index(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.cluster_bits) & (self.table_entries() - 1)
    }

    /// Returns whether a cluster of tables or data can start there, in a file of `file_len` bytes.
    ///
    /// The incomplete last cluster of the file does not count.
    #[inline]
    pub fn is_cluster(&self, offset: HostOffset, file_len: u64) -> bool {
        let size = self.cluster_size();
        offset.within(size) == 0
            && offset.0 >= self.header_bytes
            && offset.0 < file_len & !(size - 1)
    }

    /// Returns whether a whole table can start there.
    #[inline]
    pub fn is_table(&self, offset: HostOffset, file_len: u64) -> bool {
        let last = offset.checked_add(self.table_bytes() - self.cluster_size());
        self.is_cluster(offset, file_len) && last.is_some_and(|l| self.is_cluster(l, file_len))
    }
}

/// An offset that is not aligned, or not in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("offset {0:#x} is invalid")]
pub struct TableError(pub HostOffset);

/// An entry of the L1 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Offset(pub u64);

impl L2Offset {
    /// Returns the offset of the L2 table, if there is one.
    #[inline]
    pub fn decode(
        self,
        geometry: &Geometry,
        file_len: u64,
    ) -> Result<Option<HostOffset>, TableError> {
        let offset = HostOffset(self.0);
        match self.0 {
            0 => Ok(None),
            _ if geometry.is_table(offset, file_len) => Ok(Some(offset)),
            _ => Err(TableError(offset)),
        }
    }
}

/// The meaning of an L2 entry for its guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Reads go to the backing file.
    Unallocated,
    /// The cluster reads as zeroes.
    Zero,
    /// The data is at that offset of the file.
    Data {
        /// Offset of the cluster in the file.
        host: HostOffset,
    },
}

impl Cluster {
    /// Decodes an entry, in a file of `file_len` bytes.
    #[inline]
    pub fn decode(entry: u64, geometry: &Geometry, file_len: u64) -> Result<Cluster, TableError> {
        let host = HostOffset(entry);
        match entry {
            0 => Ok(Cluster::Unallocated),
            1 => Ok(Cluster::Zero),
            _ if geometry.is_cluster(host, file_len) => Ok(Cluster::Data { host }),
            _ => Err(TableError(host)),
        }
    }

    /// Encodes the entry.
    pub fn encode(self) -> u64 {
        match self {
            Cluster::Unallocated => 0,
            Cluster::Zero => 1,
            Cluster::Data { host } => host.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: Geometry = Geometry {
        cluster_bits: 16,
        table_clusters_bits: 2,
        header_bytes: 65536,
    };

    #[test]
    fn the_specifications_numbers_come_out() {
        assert_eq!(G.table_bytes(), 256 << 10);
        assert_eq!(G.table_entries(), 32768);
        assert_eq!(G.max_size(), 64 << 40);
        let guest = GuestOffset(3 << 30);
        assert_eq!((G.l1_index(guest), G.l2_index(guest)), (1, 16384));
        let largest = Geometry {
            cluster_bits: 26,
            table_clusters_bits: 4,
            ..G
        };
        assert_eq!(largest.max_size(), i64::MAX as u64);
    }

    #[test]
    fn entries_are_within_the_file() {
        let file = 10 << 16;
        let data = |host| {
            Ok(Cluster::Data {
                host: HostOffset(host),
            })
        };
        let bad = |offset| Err(TableError(HostOffset(offset)));
        for (entry, cluster) in [
            (0, Ok(Cluster::Unallocated)),
            (1, Ok(Cluster::Zero)),
            (0x10000, data(0x10000)),
            (0x90000, data(0x90000)),
            (0xa0000, bad(0xa0000)),
            (2, bad(2)),
            (0x18000, bad(0x18000)),
            (!0xffff, bad(!0xffff)),
        ] {
            assert_eq!(Cluster::decode(entry, &G, file), cluster);
        }
        assert_eq!(L2Offset(0).decode(&G, file), Ok(None));
        assert_eq!(
            L2Offset(0x60000).decode(&G, file),
            Ok(Some(HostOffset(0x60000)))
        );
        assert!(L2Offset(0x70000).decode(&G, file).is_err());
        // The incomplete last cluster of the file does not count.
        assert!(L2Offset(0x60000).decode(&G, file - 1).is_err());
        assert!(L2Offset(!0xffff).decode(&G, file).is_err());
    }
}
