//! Where metadata is, so that no write hits it by mistake.

use super::{Header, L1Entry};
use crate::HostOffset;
use std::fmt;
use std::ops::Range;

/// What is in a range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// The first cluster.
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

/// Ranges of the file in whole clusters, each with what is in it. Lookups cost
/// the logarithm of their number.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    cluster_bits: u32,
    /// By their ends. Ranges that were added first may hide later ones that
    /// overlap them; `add` says so.
    by_end: std::collections::BTreeMap<u64, (u64, Region)>,
}

impl Regions {
    /// What the header alone tells, and the overlaps among it.
    /// `snapshot_table_bytes` is 0 where there are no snapshots.
    pub fn of_header(header: &Header, snapshot_table_bytes: u64) -> (Regions, Vec<Overlap>) {
        let mut regions = Regions {
            cluster_bits: header.cluster_bits,
            ..Regions::default()
        };
        let l1 = u64::from(header.l1_entries) * L1Entry::SIZE;
        let bitmaps = header.bitmaps();
        // (One that is not valid has been refused.)
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

    /// No regions yet.
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

    /// All of them, as ranges of clusters.
    pub fn clusters_of_all(&self) -> impl Iterator<Item = Range<u64>> {
        self.by_end.iter().map(|(end, (start, _))| *start..*end)
    }

    /// The whole clusters of `len` bytes from `offset` on; empty for `len` 0.
    fn clusters(&self, offset: HostOffset, len: u64) -> Range<u64> {
        let start = offset.cluster(self.cluster_bits);
        if len == 0 {
            return start..start;
        }
        let last = offset.0.saturating_add(len - 1) >> self.cluster_bits;
        start..last + 1
    }

    /// Adds a region, rounded out to clusters, or says what is there already.
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

    /// Forgets the region that starts there.
    pub fn remove(&mut self, offset: HostOffset, len: u64) {
        let end = self.clusters(offset, len).end;
        self.by_end.remove(&end);
    }

    /// What a write of `len` bytes at `offset` would hit.
    pub fn overlap(&self, offset: HostOffset, len: u64) -> Option<Region> {
        let clusters = self.clusters(offset, len);
        if clusters.is_empty() {
            return None;
        }
        let (_, (start, region)) = self.by_end.range(clusters.start + 1..).next()?;
        (*start < clusters.end).then_some(*region)
    }
}

/// Two kinds of metadata in one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{region} overlaps {with}")]
pub struct Overlap {
    /// What was added.
    pub region: Region,
    /// What was there.
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
