//! The bitmap directory and bitmap tables.

use super::bytes::{printable, u16_at, u32_at, u64_at};
use super::{EntryError, Geometry};
use crate::{Error, HostOffset, Result};

/// Maximum number of bitmaps in an image.
pub const MAX_BITMAPS: u32 = 65535;
/// Maximum size of the bitmap directory in bytes.
pub const MAX_DIRECTORY_BYTES: u64 = 1024 * 65535;
/// Maximum size of a bitmap table in bytes.
pub const MAX_TABLE_BYTES: u64 = 0x800_0000 * 8;
/// Maximum size of one bitmap's data in bytes that QEMU accepts.
pub const MAX_BITS_BYTES: u64 = 512 << 20;
const MAX_NAME: usize = 1023;
const FIXED_LEN: usize = 24;
/// The only type of bitmap that the specification defines: a dirty tracking bitmap.
const KIND: u8 = 1;

/// Bitmap flag: the bitmap was not saved properly, so its contents are not valid.
pub const FLAG_IN_USE: u32 = 1 << 0;
/// Bitmap flag: the bitmap must record every write.
pub const FLAG_AUTO: u32 = 1 << 1;
/// Bitmap flag: software that does not know the extra data may use the bitmap nevertheless.
pub const FLAG_EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;
const FLAGS_RESERVED: u32 = !0b111;

/// An entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Where the bitmap table starts.
    pub table_offset: HostOffset,
    /// Number of entries of the bitmap table.
    pub table_entries: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// log2 of the number of bytes that a bit covers.
    pub granularity_bits: u8,
    /// The bitmap's name, unique in the image.
    pub name: Vec<u8>,
    /// Extra data, whose meaning is unknown here.
    pub extra: Vec<u8>,
}

impl Bitmap {
    /// Parses the entry at the start of `bytes`, the rest of the directory. Also returns the length
    /// of the entry in bytes.
    pub fn parse(bytes: &[u8], geometry: &Geometry) -> Result<(Bitmap, usize)> {
        let cut = || Error::invalid("its bitmap directory is cut short");
        let fixed = bytes.get(..FIXED_LEN).ok_or_else(cut)?;
        let (name_len, extra_len) = (usize::from(u16_at(fixed, 18)), u32_at(fixed, 20) as usize);
        let extra = bytes.get(FIXED_LEN..).and_then(|b| b.get(..extra_len));
        let extra = extra.ok_or_else(cut)?;
        let name = bytes[FIXED_LEN + extra_len..].get(..name_len);
        let name = name.ok_or_else(cut)?;
        let len = (FIXED_LEN + extra_len + name_len).next_multiple_of(8);
        if len > bytes.len() {
            return Err(cut());
        }
        let bitmap = Bitmap {
            table_offset: HostOffset(u64_at(fixed, 0)),
            table_entries: u32_at(fixed, 8),
            flags: u32_at(fixed, 12),
            granularity_bits: fixed[17],
            name: name.to_vec(),
            extra: extra.to_vec(),
        };
        bitmap.validate(fixed[16], geometry)?;
        Ok((bitmap, len))
    }

    fn validate(&self, kind: u8, geometry: &Geometry) -> Result<()> {
        let table = u64::from(self.table_entries) * 8;
        let end = self.table_offset.checked_add(table);
        let problem = if kind != KIND {
            "is of an unknown kind"
        } else if self.name.is_empty() || self.name.len() > MAX_NAME {
            "has no name or a name of more than 1023 bytes"
        } else if self.flags & FLAGS_RESERVED != 0 {
            "has reserved flags"
        } else if !(9..=31).contains(&self.granularity_bits) {
            "has a granularity that is not 512 bytes to 2 GiB"
        } else if self.table_entries == 0 || table > MAX_TABLE_BYTES {
            "has no table or too large a table"
        } else if self.table_offset.0 == 0
            || !geometry.is_aligned(self.table_offset)
            || end.is_none_or(|end| end.0 > i64::MAX as u64)
        {
            "has a table at an invalid offset"
        } else {
            return Ok(());
        };
        let name = printable(&self.name);
        Err(Error::invalid(format!("bitmap '{name}' {problem}")))
    }

    /// Whether the table describes no more data than the limit, [`MAX_BITS_BYTES`] or one cluster.
    pub fn has_bits_of_a_size(&self, geometry: &Geometry) -> bool {
        let bytes = u64::from(self.table_entries) * geometry.cluster_size();
        bytes <= MAX_BITS_BYTES.max(geometry.cluster_size())
    }

    /// Whether the bitmap must record every write and has no extra data.
    pub fn is_plainly_enabled(&self) -> bool {
        self.flags & FLAG_AUTO != 0 && self.extra.is_empty()
    }

    /// Length of the bitmap's directory entry in bytes.
    pub fn encoded_len(&self) -> u64 {
        (FIXED_LEN + self.extra.len() + self.name.len()).next_multiple_of(8) as u64
    }

    /// Appends the bitmap's directory entry to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.encoded_len() as usize;
        out.extend(self.table_offset.0.to_be_bytes());
        out.extend(self.table_entries.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend([KIND, self.granularity_bits]);
        out.extend((self.name.len() as u16).to_be_bytes());
        out.extend((self.extra.len() as u32).to_be_bytes());
        out.extend(&self.extra);
        out.extend(&self.name);
        out.resize(end, 0);
    }

    /// Size of the bitmap's data in bytes for a disk of `size` bytes.
    pub fn bytes_for(&self, size: u64) -> u64 {
        size.div_ceil(self.granularity()).div_ceil(8)
    }

    /// Number of bytes that a bit covers.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }
}

/// An entry of a bitmap table: the place of a cluster of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEntry(pub u64);

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const RESERVED: u64 = 0xff00_0000_0000_01fe;

impl TableEntry {
    /// The entry of a cluster whose bits are all 1; the cluster is not stored.
    pub const ALL_ONES: TableEntry = TableEntry(1);

    /// Returns the place of the bits, or `None` if all bits are equal and not stored.
    pub fn cluster(
        self,
        geometry: &Geometry,
    ) -> std::result::Result<Option<HostOffset>, EntryError> {
        let offset = HostOffset(self.0 & OFFSET);
        if self.0 & RESERVED != 0 || offset.0 != 0 && self.0 & 1 != 0 {
            return Err(EntryError::ReservedBits(self.0));
        }
        if !geometry.is_aligned(offset) {
            return Err(EntryError::Unaligned(offset));
        }
        Ok((offset.0 != 0).then_some(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: Geometry = Geometry {
        cluster_bits: 16,
        refcount_order: 4,
        extended_l2: false,
        data_file: false,
        version: 3,
    };

    fn entry() -> Vec<u8> {
        let mut bytes = 0x50000u64.to_be_bytes().to_vec();
        bytes.extend(1u32.to_be_bytes());
        bytes.extend(FLAG_AUTO.to_be_bytes());
        bytes.extend([1, 16, 0, 2]);
        bytes.extend(3u32.to_be_bytes());
        bytes.extend(b"xyzb0\0\0\0");
        bytes
    }

    #[test]
    fn entries_are_parsed_with_their_extra_data() {
        let bytes = entry();
        let (bitmap, len) = Bitmap::parse(&bytes, &G).unwrap();
        assert_eq!((bitmap.name.as_slice(), len), (&b"b0"[..], bytes.len()));
        assert_eq!(
            (bitmap.extra.as_slice(), bitmap.granularity()),
            (&b"xyz"[..], 65536)
        );
        let mut encoded = Vec::new();
        bitmap.encode(&mut encoded);
        assert_eq!(encoded, bytes);
        for cut in 0..len {
            assert!(Bitmap::parse(&bytes[..cut], &G).is_err());
        }
    }

    #[test]
    fn each_contradiction_is_told() {
        for (at, byte, words) in [
            (7, 1, "offset"),
            (0, 0x80, "offset"),
            (11, 0, "no table"),
            (8, 0x80, "too large a table"),
            (15, 8, "reserved flags"),
            (16, 2, "unknown kind"),
            (17, 8, "granularity"),
            (17, 64, "granularity"),
            (19, 0, "name"),
            (20, 1, "cut short"),
        ] {
            let mut bytes = entry();
            bytes[at] = byte;
            let error = Bitmap::parse(&bytes, &G).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn table_entries_are_offsets_of_clusters_or_constants() {
        assert_eq!(TableEntry(0).cluster(&G), Ok(None));
        assert_eq!(TableEntry::ALL_ONES.cluster(&G), Ok(None));
        assert_eq!(
            TableEntry(0x30000).cluster(&G),
            Ok(Some(HostOffset(0x30000)))
        );
        for bad in [0x30001, 0x30200, 2, 1 << 56] {
            assert!(TableEntry(bad).cluster(&G).is_err());
        }
    }
}
