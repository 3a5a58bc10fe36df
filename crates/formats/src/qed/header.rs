//! The header of a QED image.

use super::{CLUSTER_SIZES, Geometry, TABLE_SIZES};
use crate::{Error, HostOffset, Result};

/// The first four bytes.
pub const MAGIC: [u8; 4] = *b"QED\0";
/// Bytes of the header without the backing file's name.
pub const HEADER_LEN: usize = 64;
/// Maximum bytes of a backing file's name.
pub const MAX_BACKING_NAME: u32 = 1023;

/// Feature bit: the image has a backing file.
pub const FEATURE_BACKING_FILE: u64 = 1 << 0;
/// Feature bit: tables may be inconsistent; the image must be checked before use.
pub const FEATURE_NEED_CHECK: u64 = 1 << 1;
/// Feature bit: the backing file is raw, even if its contents look like another format.
pub const FEATURE_BACKING_FORMAT_NO_PROBE: u64 = 1 << 2;
const FEATURES_KNOWN: u64 = 0b111;

/// The header without the backing file's name.
///
/// The name is elsewhere in the header's clusters: see [`Header::backing_range`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Cluster size in bytes: a power of two from 4 KiB to 64 MiB.
    pub cluster_size: u32,
    /// Size of each L1 and L2 table in clusters: a power of two from 1 to 16.
    pub table_size: u32,
    /// Number of clusters before the first one that may hold tables or data.
    pub header_size: u32,
    /// `FEATURE_*` bits, all of them known.
    pub features: u64,
    /// Compatible feature bits. None is known; they are ignored and kept.
    pub compat_features: u64,
    /// Autoclear feature bits. None is known; they are cleared before the first write.
    pub autoclear_features: u64,
    /// Offset of the L1 table.
    pub l1_offset: HostOffset,
    /// Size of the disk in bytes.
    pub image_size: u64,
    /// Offset of the backing file's name; valid only with the backing file feature.
    pub backing_offset: u32,
    /// Length of the backing file's name in bytes.
    pub backing_len: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl Header {
    /// Parses the first [`HEADER_LEN`] bytes.
    ///
    /// [`Header::validate_l1`] checks whether the L1 table is within the file.
    pub fn parse(bytes: &[u8]) -> Result<Header> {
        if bytes.len() < HEADER_LEN || bytes[..4] != MAGIC {
            return Err(Error::NotThisFormat { format: "qed" });
        }
        let header = Header {
            cluster_size: u32_at(bytes, 4),
            table_size: u32_at(bytes, 8),
            header_size: u32_at(bytes, 12),
            features: u64_at(bytes, 16),
            compat_features: u64_at(bytes, 24),
            autoclear_features: u64_at(bytes, 32),
            l1_offset: HostOffset(u64_at(bytes, 40)),
            image_size: u64_at(bytes, 48),
            backing_offset: u32_at(bytes, 56),
            backing_len: u32_at(bytes, 60),
        };
        header.validate()?;
        Ok(header)
    }

    fn validate(&self) -> Result<()> {
        let unknown = self.features & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(Error::unsupported(format!(
                "needs features that are not supported: {unknown:#x}"
            )));
        }
        if !CLUSTER_SIZES.contains(&self.cluster_size) || !self.cluster_size.is_power_of_two() {
            return Err(Error::invalid(format!(
                "a cluster size of {} bytes is not a power of two of 4 KiB to 64 MiB",
                self.cluster_size
            )));
        }
        if !TABLE_SIZES.contains(&self.table_size) || !self.table_size.is_power_of_two() {
            return Err(Error::invalid(format!(
                "a table size of {} clusters is not 1, 2, 4, 8 or 16",
                self.table_size
            )));
        }
        if self.header_size == 0 || self.header_bytes() > u32::MAX.into() {
            return Err(Error::invalid(format!(
                "a header of {} clusters is invalid",
                self.header_size
            )));
        }
        if !self.image_size.is_multiple_of(512) {
            return Err(Error::invalid(format!(
                "a disk of {} bytes is not a multiple of 512",
                self.image_size
            )));
        }
        if self.image_size > self.geometry().max_size() {
            return Err(Error::invalid(format!(
                "a disk of {} bytes is too large for its tables",
                self.image_size
            )));
        }
        self.validate_backing()
    }

    fn validate_backing(&self) -> Result<()> {
        if self.backing_range().is_none() {
            return Ok(());
        }
        let end = u64::from(self.backing_offset) + u64::from(self.backing_len);
        if self.backing_len > MAX_BACKING_NAME {
            return Err(Error::invalid(format!(
                "the backing file's name has {} bytes, more than 1023",
                self.backing_len
            )));
        }
        if end > self.header_bytes() || (self.backing_offset as usize) < HEADER_LEN {
            return Err(Error::invalid(format!(
                "the backing file's name at {} is not in the header's clusters",
                self.backing_offset
            )));
        }
        Ok(())
    }

    /// Returns the offset and length in bytes, at most 1023, of the backing file's name.
    pub fn backing_range(&self) -> Option<(u64, usize)> {
        let there = self.features & FEATURE_BACKING_FILE != 0 && self.backing_len != 0;
        there.then(|| (self.backing_offset.into(), self.backing_len as usize))
    }

    /// Returns whether the backing file is raw, even if its contents look like another format.
    pub fn backing_is_raw(&self) -> bool {
        self.features & FEATURE_BACKING_FORMAT_NO_PROBE != 0
    }

    /// Returns whether tables may be inconsistent.
    pub fn needs_check(&self) -> bool {
        self.features & FEATURE_NEED_CHECK != 0
    }

    /// Returns the number of bytes before the first table or data cluster.
    pub fn header_bytes(&self) -> u64 {
        u64::from(self.header_size) * u64::from(self.cluster_size)
    }

    /// Returns the sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_size.ilog2(),
            table_clusters_bits: self.table_size.ilog2(),
            header_bytes: self.header_bytes(),
        }
    }

    /// Checks that the L1 table is in a file of `file_len` bytes.
    pub fn validate_l1(&self, file_len: u64) -> Result<()> {
        if self.geometry().is_table(self.l1_offset, file_len) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "its L1 table's offset {:#x} is invalid",
            self.l1_offset
        )))
    }

    /// Clears the autoclear bits before the first write; true if that changes the header.
    pub fn prepare_for_writing(&mut self) -> bool {
        std::mem::take(&mut self.autoclear_features) != 0
    }

    /// Encodes the header's [`HEADER_LEN`] bytes.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        let halves = [
            (4, self.cluster_size),
            (8, self.table_size),
            (12, self.header_size),
            (56, self.backing_offset),
            (60, self.backing_len),
        ];
        for (at, value) in halves {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let words = [
            (16, self.features),
            (24, self.compat_features),
            (32, self.autoclear_features),
            (40, self.l1_offset.0),
            (48, self.image_size),
        ];
        for (at, value) in words {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            cluster_size: 65536,
            table_size: 4,
            header_size: 1,
            features: FEATURE_BACKING_FILE | FEATURE_NEED_CHECK,
            compat_features: 1 << 63,
            autoclear_features: 1 << 62,
            l1_offset: HostOffset(65536),
            image_size: 1 << 40,
            backing_offset: 64,
            backing_len: 8,
        }
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        let mut h = header();
        assert_eq!(Header::parse(&h.encode()).unwrap(), h);
        assert!(h.needs_check() && !h.backing_is_raw());
        assert_eq!(h.backing_range(), Some((64, 8)));
        assert!(h.prepare_for_writing() && !h.prepare_for_writing());
        assert!(h.validate_l1(5 << 16).is_ok());
        assert!(h.validate_l1((5 << 16) - 1).is_err());
    }

    #[test]
    fn each_contradiction_is_told() {
        let changed = |change: fn(&mut Header), words: &str| {
            let mut h = header();
            change(&mut h);
            let error = Header::parse(&h.encode()).unwrap_err().to_string();
            assert!(error.contains(words), "no '{words}' in: {error}");
        };
        changed(|h| h.features |= 8, "0x8");
        changed(|h| h.cluster_size = 2048, "cluster size");
        changed(|h| h.cluster_size = 5000, "cluster size");
        changed(|h| h.cluster_size = 1 << 27, "cluster size");
        changed(|h| h.table_size = 0, "table size");
        changed(|h| h.table_size = 3, "table size");
        changed(|h| h.table_size = 32, "table size");
        changed(|h| h.header_size = 0, "header of");
        changed(|h| h.header_size = 65536, "header of");
        changed(|h| h.image_size += 1, "multiple of 512");
        changed(|h| h.image_size = 1 << 63, "too large");
        changed(|h| h.backing_len = 1024, "1024 bytes");
        changed(|h| h.backing_offset = 65530, "at 65530");
        changed(|h| h.backing_offset = 63, "at 63");
        changed(|h| h.backing_offset = u32::MAX, "not in the header");
        assert!(Header::parse(b"QED\0").is_err());
        assert!(Header::parse(&[0; 64]).is_err());
    }
}
