//! The places of metadata, which keep writes from overwriting metadata by mistake.

use super::{Header, L1Entry};
use crate::HostOffset;
use std::fmt;
use std::ops::Range;

/// The kind of metadata in a range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// The header, in the first cluster.
    Header,
    /// The active L1 table.
    ActiveL1,
    /// An active L2 table.
    ActiveL2,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// The snapshot table.
    SnapshotTable,
    /// A snapshot's L1 table.
    InactiveL1,
    /// The bitmap directory.
    BitmapDirectory,
    /// The encryption header, with its key slots.
    EncryptionHeader,
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Region::Header => "the header",
            Region::ActiveL1 => "the active L1 table",
            Region::ActiveL2 => "an active L2 table",
            Region::RefcountTable => "the refcount table",
            Region::RefcountBlock => "a refcount block",
            Region::SnapshotTable => "the snapshot table",
            Region::InactiveL1 => "a snapshot's L1 table",
            Region::BitmapDirectory => "the bitmap directory",
            Region::EncryptionHeader => "the encryption header",
        })
    }
}

/// Ranges of the file in whole clusters, each with its kind of metadata. A lookup takes time
/// proportional to the logarithm of the number of ranges.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    cluster_bits: u32,
    /// Start and kind of each range, by the range's end. A range that overlaps an earlier one is
    /// not stored; `add` reports the overlap.
    by_end: std::collections::BTreeMap<u64, (u64, Region)>,
}

impl Regions {
    /// Collects the regions that the header describes, and the overlaps among them.
    /// `snapshot_table_bytes` is 0 if there are no snapshots.
    pub fn of_header(header: &Header, snapshot_table_bytes: u64) -> (Regions, Vec<Overlap>) {
        let mut regions = Regions {
            cluster_bits: header.cluster_bits,
            ..Regions::default()
        };
        let l1 = u64::from(header.l1_entries) * L1Entry::SIZE;
        let bitmaps = header.bitmaps();
        // An invalid encryption header has been refused before.
        let crypto = header.encryption().ok().flatten();
        let parts = [
            (Region::Header, HostOffset(0), 1),
            (Region::ActiveL1, header.l1_offset, l1),
            (
                Region::RefcountTable,
                header.refcount_table_offset,
                header.refcount_table_bytes(),
            ),
            (
                Region::SnapshotTable,
                header.snapshots_offset,
                snapshot_table_bytes,
            ),
            (
                Region::BitmapDirectory,
                bitmaps.map_or(HostOffset(0), |b| b.directory_offset),
                bitmaps.map_or(0, |b| b.directory_size),
            ),
            (
                Region::EncryptionHeader,
                crypto.map_or(HostOffset(0), |c| c.offset),
                crypto.map_or(0, |c| c.len),
            ),
        ];
        let mut overlaps = Vec::new();
        for (region, offset, len) in parts {
            overlaps.extend(regions.add(region, offset, len).err());
        }
        (regions, overlaps)
    }

    /// Creates an empty set of regions.
    pub fn new(cluster_bits: u32) -> Regions {
        Regions {
            cluster_bits,
            ..Regions::default()
        }
    }

    /// log2 of the cluster size.
    pub fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    /// Returns all regions as ranges of cluster numbers.
    pub fn clusters_of_all(&self) -> impl Iterator<Item = Range<u64>> {
        self.by_end.iter().map(|(end, (start, _))| *start..*end)
    }

    /// Returns the clusters that `len` bytes from `offset` touch. The range is empty if `len` is 0.
    fn clusters(&self, offset: HostOffset, len: u64) -> Range<u64> {
        let start = offset.cluster(self.cluster_bits);
        if len == 0 {
            return start..start;
        }
        let last = offset.0.saturating_add(len - 1) >> self.cluster_bits;
        start..last + 1
    }

    /// Adds a region, rounded out to clusters. Fails if the region overlaps an existing one, and
    /// then does not add it.
    pub fn add(&mut self, region: Region, offset: HostOffset, len: u64) -> Result<(), Overlap> {
        if let Some(at) = self.overlap(offset, len) {
            return Err(Overlap { region, with: at });
        }
        let clusters = self.clusters(offset, len);
        if !clusters.is_empty() {
            self.by_end.insert(clusters.end, (clusters.start, region));
        }
        Ok(())
    }

    /// Removes the region that covers `len` bytes from `offset`.
    pub fn remove(&mut self, offset: HostOffset, len: u64) {
        let end = self.clusters(offset, len).end;
        self.by_end.remove(&end);
    }

    /// Returns the first region that a write of `len` bytes at `offset` would overwrite.
    pub fn overlap(&self, offset: HostOffset, len: u64) -> Option<Region> {
        let clusters = self.clusters(offset, len);
        if clusters.is_empty() {
            return None;
        }
        let (_, (start, region)) = self.by_end.range(clusters.start + 1..).next()?;
        (*start < clusters.end).then_some(*region)
    }
}

/// Two regions that share a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{region} overlaps {with}")]
pub struct Overlap {
    /// The region that was to be added.
    pub region: Region,
    /// The region that was there before.
    pub with: Region,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_that_would_hit_metadata_are_found() {
        let mut regions = Regions {
            cluster_bits: 16,
            ..Regions::default()
        };
        regions.add(Region::Header, HostOffset(0), 1).unwrap();
        regions
            .add(Region::ActiveL1, HostOffset(0x30000), 0x10008)
            .unwrap();
        regions
            .add(Region::ActiveL2, HostOffset(0x80000), 0x10000)
            .unwrap();
        assert_eq!(regions.overlap(HostOffset(0x10000), 0x20000), None);
        assert_eq!(
            regions.overlap(HostOffset(0x10000), 0x20001),
            Some(Region::ActiveL1)
        );
        assert_eq!(
            regions.overlap(HostOffset(0x4ffff), 1),
            Some(Region::ActiveL1)
        );
        assert_eq!(regions.overlap(HostOffset(0x50000), 0x30000), None);
        assert_eq!(
            regions.overlap(HostOffset(0x50000), 0x40000),
            Some(Region::ActiveL2)
        );
        assert_eq!(
            regions.overlap(HostOffset(0), u64::MAX),
            Some(Region::Header)
        );
        assert_eq!(regions.overlap(HostOffset(0x90000), u64::MAX), None);
        let overlap = regions.add(Region::RefcountTable, HostOffset(0x40000), 0x10000);
        let text = overlap.unwrap_err().to_string();
        assert_eq!(text, "the refcount table overlaps the active L1 table");
        regions.remove(HostOffset(0x30000), 0x10008);
        assert_eq!(regions.overlap(HostOffset(0x40000), 1), None);
    }
}
