//! Entries of L1 and L2 tables.

use super::{Geometry, MAX_HOST_OFFSET};
use crate::HostOffset;

/// The cluster's refcount is exactly one: it may be written in place.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1 << 0;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const STANDARD_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// An entry of an L1 table: where an L2 table is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Bytes in the file.
    pub const SIZE: u64 = 8;

    /// An L2 table at `offset`; `copied` as of its refcount.
    pub fn new(offset: HostOffset, copied: bool) -> L1Entry {
        debug_assert_eq!(offset.0 & !OFFSET, 0);
        L1Entry(offset.0 | if copied { COPIED } else { 0 })
    }

    /// Where the L2 table starts, or `None` when there is none. Reserved bits
    /// and offsets within a cluster are errors.
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

    /// The offset's bits as they are, for a check that goes on after errors.
    #[inline]
    pub fn raw_offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET)
    }

    /// The same without what must be 0.
    pub fn without_reserved(self) -> L1Entry {
        L1Entry(self.0 & !L1_RESERVED)
    }

    /// The L2 table may be written in place. Accurate in the active L1 table only.
    #[inline]
    pub fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// The same entry with the flag set or cleared.
    pub fn with_copied(self, copied: bool) -> L1Entry {
        L1Entry(self.0 & !COPIED | if copied { COPIED } else { 0 })
    }
}

/// An entry of an L2 table: where a guest cluster is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Entry {
    /// The entry's first (often only) eight bytes.
    pub descriptor: u64,
    /// Of an extended entry: one bit for each allocated subcluster, and 32
    /// bits higher one for each that reads as zeroes. Otherwise 0.
    pub bitmap: u64,
}

/// What an L2 entry says of its guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Reads go to the backing file.
    Unallocated,
    /// Reads as zeroes. A host cluster may be reserved for it.
    Zero { host: Option<HostOffset> },
    /// All of it is at `host`, a multiple of the cluster size, in the image or
    /// in its external data file.
    Data { host: HostOffset },
    /// All of it is compressed; never written in place.
    Compressed(Compressed),
    /// Each subcluster has its own state, bit n standing for subcluster n. No
    /// bit is in both masks. `allocated` is 0 where there is no host cluster.
    Subclusters {
        host: Option<HostOffset>,
        allocated: u32,
        zero: u32,
    },
}

/// Where a compressed cluster's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Of the first byte in the image; not aligned to anything.
    pub offset: HostOffset,
    /// Bytes up to the end of the last sector. The compressed stream may end
    /// before that.
    pub len: u64,
}

/// Why an entry means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Bits that must be 0.
    #[error("entry {0:#x} has reserved bits set")]
    ReservedBits(u64),
    /// A table or cluster that starts within a cluster.
    #[error("offset {0:#x} is not a multiple of the cluster size")]
    Unaligned(HostOffset),
    /// Compressed data is never in an external data file.
    #[error("entry {0:#x} is compressed, in an image with an external data file")]
    CompressedInDataFile(u64),
    /// Compressed clusters are copied before they are written.
    #[error("entry {0:#x} is compressed and has the copied flag")]
    CompressedCopied(u64),
    /// An extended entry whose subclusters are both allocated and zero, or
    /// allocated without a host cluster, or in a compressed cluster.
    #[error("subcluster bitmap {0:#x} contradicts its entry")]
    SubclusterBitmap(u64),
}

impl L2Entry {
    /// Zeroes, with or without a reserved host cluster (`copied`: of refcount one).
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

    /// A wholly allocated cluster at `host`.
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

    /// A compressed cluster of `len` bytes, fewer than a cluster's, at `offset`.
    /// `None`: entries for clusters of this size cannot name that place.
    pub fn compressed(geometry: &Geometry, offset: HostOffset, len: u64) -> Option<L2Entry> {
        debug_assert!(0 < len && len < geometry.cluster_size() && !geometry.data_file);
        let x = compressed_offset_bits(geometry);
        let further = (offset.0 + len - 1) / 512 - offset.0 / 512;
        (offset < MAX_HOST_OFFSET.min(HostOffset(1 << x))).then_some(L2Entry {
            descriptor: COMPRESSED | further << x | offset.0,
            bitmap: 0,
        })
    }

    /// The same entry with the flag set or cleared.
    pub fn with_copied(self, copied: bool) -> L2Entry {
        L2Entry {
            descriptor: self.descriptor & !COPIED | if copied { COPIED } else { 0 },
            ..self
        }
    }

    /// The host cluster has refcount one. Accurate below the active L1 table only.
    #[inline]
    pub fn copied(self) -> bool {
        self.descriptor & COPIED != 0
    }

    /// The descriptor is one of a compressed cluster.
    #[inline]
    pub fn is_compressed(self) -> bool {
        self.descriptor & COMPRESSED != 0
    }

    /// The entry at byte `at` of an L2 table.
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

    /// Puts it at byte `at` of an L2 table.
    pub fn encode(self, table: &mut [u8], at: usize, geometry: &Geometry) {
        super::bytes::put_u64(table, at, self.descriptor);
        if geometry.extended_l2 {
            super::bytes::put_u64(table, at + 8, self.bitmap);
        }
    }

    /// The host cluster's offset of an entry that is not compressed, bits as
    /// they are: for a check that goes on after errors.
    #[inline]
    pub fn raw_offset(self) -> HostOffset {
        HostOffset(self.descriptor & OFFSET)
    }

    /// Whether there is a host cluster. Offset 0 is one in a data file only,
    /// and only with the copied flag.
    fn host(self, geometry: &Geometry) -> Option<HostOffset> {
        let offset = self.raw_offset();
        (offset.0 != 0 || geometry.data_file && self.copied()).then_some(offset)
    }

    /// Bits that must be 0, of an entry that is not compressed. Subclusters have a bitmap that says
    /// which are zero, and version 2 has no zero clusters.
    pub fn reserved(self, geometry: &Geometry) -> u64 {
        let has_flag = geometry.version >= 3 && !geometry.extended_l2;
        self.descriptor & (STANDARD_RESERVED | if has_flag { 0 } else { ZERO })
    }

    /// The same without what must be 0.
    pub fn without_reserved(self, geometry: &Geometry) -> L2Entry {
        L2Entry {
            descriptor: self.descriptor & !self.reserved(geometry),
            ..self
        }
    }

    /// What the entry says. The file's size is the caller's business.
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

    /// The bytes of a compressed cluster, whatever else is wrong with it.
    pub fn compressed_range(self, geometry: &Geometry) -> Compressed {
        // Bits 0 to x - 1 are the offset, x to 61 count further sectors.
        let x = compressed_offset_bits(geometry);
        let offset = self.descriptor & ((1 << x) - 1);
        let further = (self.descriptor & (COMPRESSED - 1)) >> x;
        Compressed {
            offset: HostOffset(offset),
            len: (further + 1) * 512 - offset % 512,
        }
    }
}

/// Bits of a compressed cluster's offset.
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
        // x is 54: two further sectors.
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
