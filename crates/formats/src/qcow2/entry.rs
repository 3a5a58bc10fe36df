//! Entries of L1 and L2 tables.

use super::{Geometry, MAX_HOST_OFFSET};
use crate::HostOffset;

/// The copied flag: the cluster's refcount is exactly one, so the cluster may be written in place.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1 << 0;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const STANDARD_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// An entry of an L1 table: the place of an L2 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Size of an entry in bytes.
    pub const SIZE: u64 = 8;

    /// Creates the entry for an L2 table at `offset`. `copied`: the table's refcount is one.
    pub fn new(offset: HostOffset, copied: bool) -> L1Entry {
        debug_assert_eq!(offset.0 & !OFFSET, 0);
        L1Entry(offset.0 | if copied { COPIED } else { 0 })
    }

    /// Returns the place of the L2 table, or `None` if the entry has no L2 table.
    ///
    /// # Errors
    ///
    /// Fails if reserved bits are set, or if the offset is not a multiple of the cluster size.
    #[inline]
    pub fn l2_table(self, geometry: &Geometry) -> Result<Option<HostOffset>, EntryError> {
        let offset = self.raw_offset();
        if self.0 == 0 {
            return Ok(None);
        }
        if self.0 & L1_RESERVED != 0 {
            return Err(EntryError::ReservedBits(self.0));
        }
        if !geometry.is_aligned(offset) {
            return Err(EntryError::Unaligned(offset));
        }
        Ok((offset.0 != 0).then_some(offset))
    }

    /// Returns the offset without validating it, for checks that continue after errors.
    #[inline]
    pub fn raw_offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET)
    }

    /// Returns the entry with its reserved bits cleared.
    pub fn without_reserved(self) -> L1Entry {
        L1Entry(self.0 & !L1_RESERVED)
    }

    /// Whether the L2 table may be written in place. The flag is accurate in the active L1 table
    /// only.
    #[inline]
    pub fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Returns the entry with the copied flag set or cleared.
    pub fn with_copied(self, copied: bool) -> L1Entry {
        L1Entry(self.0 & !COPIED | if copied { COPIED } else { 0 })
    }
}

/// An entry of an L2 table: the place and state of a guest cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Entry {
    /// The entry's first eight bytes. A standard entry has no others.
    pub descriptor: u64,
    /// The subcluster bitmap of an extended entry; 0 for a standard entry. Bits 0 to 31 mark
    /// allocated subclusters, bits 32 to 63 those that read as zeroes.
    pub bitmap: u64,
}

/// The state of a guest cluster, decoded from its L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Reads go to the backing file.
    Unallocated,
    /// Reads return zeroes. A host cluster may be preallocated.
    Zero {
        /// Offset of the preallocated host cluster, if one exists.
        host: Option<HostOffset>,
    },
    /// The whole cluster is at `host`, a multiple of the cluster size, in the image or in its
    /// external data file.
    Data {
        /// Offset of the host cluster.
        host: HostOffset,
    },
    /// The whole cluster is compressed. Compressed clusters are never written in place.
    Compressed(Compressed),
    /// Each subcluster has its own state; bit n is the state of subcluster n. No bit is set in both
    /// masks. `allocated` is 0 if there is no host cluster.
    Subclusters {
        /// Offset of the host cluster, if one exists.
        host: Option<HostOffset>,
        /// Mask of the subclusters whose data is in the host cluster.
        allocated: u32,
        /// Mask of the subclusters that read as zeroes.
        zero: u32,
    },
}

/// The place of a compressed cluster's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Offset of the first byte in the image, without any alignment.
    pub offset: HostOffset,
    /// Number of bytes up to the end of the last sector. The compressed stream may end earlier.
    pub len: u64,
}

/// Why an entry is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Reserved bits are set.
    #[error("entry {0:#x} has reserved bits set")]
    ReservedBits(u64),
    /// The offset of a table or cluster is not a multiple of the cluster size.
    #[error("offset {0:#x} is not a multiple of the cluster size")]
    Unaligned(HostOffset),
    /// The entry is compressed, but compressed data is never in an external data file.
    #[error("entry {0:#x} is compressed, in an image with an external data file")]
    CompressedInDataFile(u64),
    /// The entry is compressed and has the copied flag, but compressed clusters are never written
    /// in place.
    #[error("entry {0:#x} is compressed and has the copied flag")]
    CompressedCopied(u64),
    /// The subcluster bitmap of an extended entry is contradictory: a subcluster is both allocated
    /// and zero, or allocated without a host cluster, or belongs to a compressed cluster.
    #[error("subcluster bitmap {0:#x} contradicts its entry")]
    SubclusterBitmap(u64),
}

impl L2Entry {
    /// Creates the entry of a cluster that reads as zeroes. `host` is its preallocated host
    /// cluster, if any, with the copied flag.
    pub fn zero(geometry: &Geometry, host: Option<(HostOffset, bool)>) -> L2Entry {
        let place = host.map_or(0, |(offset, copied)| L1Entry::new(offset, copied).0);
        if geometry.extended_l2 {
            L2Entry {
                descriptor: place,
                bitmap: u64::from(u32::MAX) << 32,
            }
        } else {
            L2Entry {
                descriptor: place | ZERO,
                bitmap: 0,
            }
        }
    }

    /// Creates the entry of a fully allocated cluster at `host`.
    pub fn data(geometry: &Geometry, host: HostOffset, copied: bool) -> L2Entry {
        L2Entry {
            descriptor: L1Entry::new(host, copied).0,
            bitmap: if geometry.extended_l2 {
                u32::MAX.into()
            } else {
                0
            },
        }
    }

    /// Creates the entry of a compressed cluster of `len` bytes at `offset`. `len` is less than the
    /// cluster size. Returns `None` if `offset` exceeds the entry's offset field, whose width
    /// depends on the cluster size.
    pub fn compressed(geometry: &Geometry, offset: HostOffset, len: u64) -> Option<L2Entry> {
        debug_assert!(0 < len && len < geometry.cluster_size() && !geometry.data_file);
        let x = compressed_offset_bits(geometry);
        let further = (offset.0 + len - 1) / 512 - offset.0 / 512;
        (offset < MAX_HOST_OFFSET.min(HostOffset(1 << x))).then_some(L2Entry {
            descriptor: COMPRESSED | further << x | offset.0,
            bitmap: 0,
        })
    }

    /// Returns the entry with the copied flag set or cleared.
    pub fn with_copied(self, copied: bool) -> L2Entry {
        L2Entry {
            descriptor: self.descriptor & !COPIED | if copied { COPIED } else { 0 },
            ..self
        }
    }

    /// Whether the host cluster has refcount one. The flag is accurate below the active L1 table
    /// only.
    #[inline]
    pub fn copied(self) -> bool {
        self.descriptor & COPIED != 0
    }

    /// Whether the entry is that of a compressed cluster.
    #[inline]
    pub fn is_compressed(self) -> bool {
        self.descriptor & COMPRESSED != 0
    }

    /// Reads the entry at byte `at` of an L2 table.
    #[inline]
    pub fn parse(table: &[u8], at: usize, geometry: &Geometry) -> L2Entry {
        L2Entry {
            descriptor: super::bytes::u64_at(table, at),
            bitmap: if geometry.extended_l2 {
                super::bytes::u64_at(table, at + 8)
            } else {
                0
            },
        }
    }

    /// Writes the entry at byte `at` of an L2 table.
    pub fn encode(self, table: &mut [u8], at: usize, geometry: &Geometry) {
        super::bytes::put_u64(table, at, self.descriptor);
        if geometry.extended_l2 {
            super::bytes::put_u64(table, at + 8, self.bitmap);
        }
    }

    /// Returns the host offset of an entry that is not compressed, without validating it, for
    /// checks that continue after errors.
    #[inline]
    pub fn raw_offset(self) -> HostOffset {
        HostOffset(self.descriptor & OFFSET)
    }

    /// Returns the host cluster, if there is one. Offset 0 is valid only in an external data file,
    /// and only with the copied flag.
    fn host(self, geometry: &Geometry) -> Option<HostOffset> {
        let offset = self.raw_offset();
        (offset.0 != 0 || geometry.data_file && self.copied()).then_some(offset)
    }

    /// Returns the reserved bits that are set in an entry that is not compressed. The zero flag is
    /// reserved in version 2 and in extended entries, where the subcluster bitmap marks zeroes.
    pub fn reserved(self, geometry: &Geometry) -> u64 {
        let has_flag = geometry.version >= 3 && !geometry.extended_l2;
        self.descriptor & (STANDARD_RESERVED | if has_flag { 0 } else { ZERO })
    }

    /// Returns the entry with its reserved bits cleared.
    pub fn without_reserved(self, geometry: &Geometry) -> L2Entry {
        L2Entry {
            descriptor: self.descriptor & !self.reserved(geometry),
            ..self
        }
    }

    /// Decodes and validates the entry. The caller compares offsets with the file's size.
    #[inline]
    pub fn decode(self, geometry: &Geometry) -> Result<Cluster, EntryError> {
        if self.descriptor == 0 && self.bitmap == 0 {
            return Ok(Cluster::Unallocated);
        }
        if self.is_compressed() {
            return self.decode_compressed(geometry).map(Cluster::Compressed);
        }
        if self.reserved(geometry) != 0 {
            return Err(EntryError::ReservedBits(self.descriptor));
        }
        let host = self.host(geometry);
        if let Some(offset) = host
            && !geometry.is_aligned(offset)
        {
            return Err(EntryError::Unaligned(offset));
        }
        if geometry.extended_l2 {
            return self.decode_subclusters(host);
        }
        let zero = self.descriptor & ZERO != 0;
        match host {
            host if zero => Ok(Cluster::Zero { host }),
            None => Ok(Cluster::Unallocated),
            Some(host) => Ok(Cluster::Data { host }),
        }
    }

    fn decode_subclusters(self, host: Option<HostOffset>) -> Result<Cluster, EntryError> {
        let (allocated, zero) = (self.bitmap as u32, (self.bitmap >> 32) as u32);
        if allocated & zero != 0 || allocated != 0 && host.is_none() {
            return Err(EntryError::SubclusterBitmap(self.bitmap));
        }
        Ok(match (host, allocated, zero) {
            (Some(host), u32::MAX, _) => Cluster::Data { host },
            (host, _, u32::MAX) => Cluster::Zero { host },
            (None, _, 0) => Cluster::Unallocated,
            (host, allocated, zero) => Cluster::Subclusters {
                host,
                allocated,
                zero,
            },
        })
    }

    fn decode_compressed(self, geometry: &Geometry) -> Result<Compressed, EntryError> {
        let compressed = self.compressed_range(geometry);
        if geometry.data_file {
            Err(EntryError::CompressedInDataFile(self.descriptor))
        } else if self.copied() {
            Err(EntryError::CompressedCopied(self.descriptor))
        } else if self.bitmap != 0 {
            Err(EntryError::SubclusterBitmap(self.bitmap))
        } else if compressed.offset >= MAX_HOST_OFFSET {
            Err(EntryError::ReservedBits(self.descriptor))
        } else {
            Ok(compressed)
        }
    }

    /// Returns the byte range of a compressed cluster without validating the entry.
    pub fn compressed_range(self, geometry: &Geometry) -> Compressed {
        // Bits 0 to x - 1 are the offset; bits x to 61 are the number of additional sectors.
        let x = compressed_offset_bits(geometry);
        let offset = self.descriptor & ((1 << x) - 1);
        let further = (self.descriptor & (COMPRESSED - 1)) >> x;
        Compressed {
            offset: HostOffset(offset),
            len: (further + 1) * 512 - offset % 512,
        }
    }
}

/// Number of bits of a compressed cluster's offset (x in the specification).
fn compressed_offset_bits(geometry: &Geometry) -> u32 {
    62 - (geometry.cluster_bits - 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, extended_l2: bool, data_file: bool) -> Geometry {
        Geometry {
            cluster_bits,
            refcount_order: 4,
            extended_l2,
            data_file,
            version: 3,
        }
    }

    fn plain(descriptor: u64) -> L2Entry {
        L2Entry {
            descriptor,
            bitmap: 0,
        }
    }

    fn data(host: u64) -> Cluster {
        Cluster::Data {
            host: HostOffset(host),
        }
    }

    fn reserved(host: u64) -> Cluster {
        Cluster::Zero {
            host: Some(HostOffset(host)),
        }
    }

    #[test]
    fn standard_entries_mean_what_the_specification_says() {
        let g = geometry(16, false, false);
        let decode = |descriptor| plain(descriptor).decode(&g);
        assert_eq!(decode(0), Ok(Cluster::Unallocated));
        assert_eq!(decode(COPIED), Ok(Cluster::Unallocated));
        assert_eq!(decode(1), Ok(Cluster::Zero { host: None }));
        let host = Some(HostOffset(0x50000));
        assert_eq!(decode(COPIED | 0x50001), Ok(Cluster::Zero { host }));
        assert_eq!(decode(0x50000), Ok(data(0x50000)));
        assert_eq!(
            decode(0x50200),
            Err(EntryError::Unaligned(HostOffset(0x50200)))
        );
        assert_eq!(decode(0x50002), Err(EntryError::ReservedBits(0x50002)));
        let far = COPIED | 1 << 56;
        assert_eq!(decode(far), Err(EntryError::ReservedBits(far)));
        let old = Geometry { version: 2, ..g };
        assert_eq!(plain(1).decode(&old), Err(EntryError::ReservedBits(1)));
    }

    #[test]
    fn a_data_files_first_cluster_is_told_by_the_copied_flag() {
        let g = geometry(16, false, true);
        assert_eq!(plain(COPIED).decode(&g), Ok(data(0)));
        assert_eq!(plain(0).decode(&g), Ok(Cluster::Unallocated));
        let zero = reserved(0);
        assert_eq!(plain(COPIED | 1).decode(&g), Ok(zero));
        let compressed = plain(COMPRESSED | 512);
        assert!(compressed.decode(&g).is_err());
    }

    #[test]
    fn compressed_entries_end_with_their_last_sector() {
        let g = geometry(16, false, false);
        // x is 54: two additional sectors.
        let entry = plain(COMPRESSED | 2 << 54 | 0x50123);
        let expected = Compressed {
            offset: HostOffset(0x50123),
            len: 3 * 512 - 0x123,
        };
        assert_eq!(entry.decode(&g), Ok(Cluster::Compressed(expected)));
        assert!(entry.with_copied(true).decode(&g).is_err());
        // With 512-byte clusters, x is 61: bits beyond 55 must be 0.
        let small = geometry(9, false, false);
        assert!(plain(COMPRESSED | 1 << 56).decode(&small).is_err());
        assert!(plain(COMPRESSED | 1 << 61 | 1).decode(&small).is_ok());
    }

    #[test]
    fn subclusters_are_allocated_or_zero_or_neither() {
        let g = geometry(16, true, false);
        let decode = |descriptor, bitmap| L2Entry { descriptor, bitmap }.decode(&g);
        assert_eq!(decode(0, 0), Ok(Cluster::Unallocated));
        let zero = Cluster::Zero { host: None };
        assert_eq!(decode(0, 0xffff_ffff << 32), Ok(zero));
        let full = u64::from(u32::MAX);
        assert_eq!(decode(0x50000, full), Ok(data(0x50000)));
        let some = Cluster::Subclusters {
            host: Some(HostOffset(0x50000)),
            allocated: 1,
            zero: 2,
        };
        assert_eq!(decode(0x50000, 2 << 32 | 1), Ok(some));
        assert!(decode(0x50000, 1 << 32 | 1).is_err());
        assert!(decode(0, 1).is_err());
        assert!(decode(COMPRESSED | 0x50000, 1).is_err());
        assert!(decode(0x50001, full).is_err());
        let reserved = Cluster::Subclusters {
            host: Some(HostOffset(0x50000)),
            allocated: 0,
            zero: 0,
        };
        assert_eq!(decode(0x50000, 0), Ok(reserved));
    }

    #[test]
    fn a_compressed_cluster_is_where_it_was_put() {
        for bits in 9..=21 {
            let g = geometry(bits, bits >= 14, false);
            let size = g.cluster_size();
            let end = MAX_HOST_OFFSET.0.min(1 << compressed_offset_bits(&g));
            for offset in [size, size + 1, 3 * size - 1, 5 * size + 300, end - 1] {
                for len in [1, 2, 211, 212, 213, size / 2, size - 1] {
                    let offset = HostOffset(offset);
                    let entry = L2Entry::compressed(&g, offset, len).unwrap();
                    let Ok(Cluster::Compressed(range)) = entry.decode(&g) else {
                        panic!("{entry:?}");
                    };
                    assert_eq!(range.offset, offset);
                    let last = (offset + len).up_to(512);
                    assert_eq!(range.offset + range.len, last, "{offset:?} {len}");
                }
            }
            assert_eq!(L2Entry::compressed(&g, HostOffset(end), 1), None);
        }
    }

    #[test]
    fn entries_are_read_as_they_were_written() {
        for extended in [false, true] {
            let g = geometry(16, extended, false);
            let size = g.l2_entry_size() as usize;
            let mut table = vec![0; 3 * size];
            let entries = [
                (L2Entry::data(&g, HostOffset(0x70000), true), data(0x70000)),
                (L2Entry::zero(&g, None), Cluster::Zero { host: None }),
                (
                    L2Entry::zero(&g, Some((HostOffset(0x80000), false))),
                    reserved(0x80000),
                ),
            ];
            for (i, (entry, _)) in entries.iter().enumerate() {
                entry.encode(&mut table, i * size, &g);
            }
            for (i, (entry, cluster)) in entries.iter().enumerate() {
                let read = L2Entry::parse(&table, i * size, &g);
                assert_eq!(read, *entry);
                assert_eq!(read.decode(&g).as_ref(), Ok(cluster));
            }
        }
    }
}
