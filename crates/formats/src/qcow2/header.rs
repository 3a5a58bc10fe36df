//! The qcow2 header, in the image's first cluster.

use super::bytes::{printable, put_u32, put_u64, u32_at, u64_at};
use super::extension::{self, BitmapsExtension, CryptoHeader, Extension};
use super::features::{
    self, AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, AUTOCLEAR_RAW_DATA_FILE, INCOMPATIBLE_COMPRESSION,
    INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY, INCOMPATIBLE_EXTENDED_L2,
};
use super::{
    Geometry, L1Entry, MAX_BACKING_NAME, MAX_CLUSTER_BITS, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES,
    MAX_SNAPSHOT_TABLE_BYTES, MAX_SNAPSHOTS, MIN_CLUSTER_BITS, MIN_EXTENDED_L2_CLUSTER_BITS,
};
use crate::{Error, HostOffset, Result};

/// The magic number, the header's first four bytes.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Maximum length of the header and its extensions, which must fit into the first cluster.
pub const MAX_HEADER_LEN: usize = 1 << MAX_CLUSTER_BITS;

/// Minimum and maximum length of an encryption header in bytes. The minimum is that of a LUKS
/// version 1 header without key material; the maximum is more than a header with key material
/// needs.
const LUKS_MIN: u64 = 592;
const LUKS_MAX: u64 = 64 << 20;

const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// Byte offset of the compression type. The fields from the next byte on are unknown here.
const COMPRESSION_AT: usize = 104;
/// Minimum length in bytes of the version 3 headers that are written: with compression type and
/// padding.
const FULL_LEN: usize = 112;

/// Compression method of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionType {
    /// A raw deflate stream; QEMU calls it zlib.
    Deflate,
    /// A zstd stream.
    Zstd,
}

impl CompressionType {
    /// Returns the name in QEMU's options and output.
    pub fn name(self) -> &'static str {
        match self {
            CompressionType::Deflate => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// Encryption method of guest data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CryptMethod {
    /// Guest data is not encrypted.
    None,
    /// The obsolete AES-CBC encryption.
    Aes,
    /// LUKS encryption.
    Luks,
}

/// All that the first cluster contains. The fields are public: code that changes one and writes the
/// header back must keep the image consistent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// The backing file's name as it is written in the image.
    pub backing_file: Option<Vec<u8>>,
    /// log2 of the cluster size in bytes.
    pub cluster_bits: u32,
    /// The disk's size in bytes.
    pub size: u64,
    /// Encryption method of guest data. See [`Header::encryption`].
    pub crypt_method: CryptMethod,
    /// Number of entries of the active L1 table.
    pub l1_entries: u32,
    /// Where the active L1 table starts.
    pub l1_offset: HostOffset,
    /// Where the refcount table starts.
    pub refcount_table_offset: HostOffset,
    /// Size of the refcount table in clusters.
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub snapshots: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: HostOffset,
    /// `INCOMPATIBLE_*` bits. All of them are known.
    pub incompatible: u64,
    /// `COMPATIBLE_*` bits and unknown bits.
    pub compatible: u64,
    /// `AUTOCLEAR_*` bits and unknown bits. See [`Header::prepare_for_writing`].
    pub autoclear: u64,
    /// log2 of the width of refcounts in bits.
    pub refcount_order: u32,
    /// Compression method of compressed clusters.
    pub compression: CompressionType,
    /// The bytes after the known fields of a version 3 header, including padding.
    pub unknown_fields: Vec<u8>,
    /// Header extensions, in the order of the file.
    pub extensions: Vec<Extension>,
}

/// The bytes of the header's fixed part, not validated.
struct Fixed<'a>(&'a [u8]);

impl Fixed<'_> {
    fn version(&self) -> u32 {
        u32_at(self.0, 4)
    }

    /// Returns a `u32` field of a version 3 header, or 0 if the version is 2 or the file is too
    /// short.
    fn u32_if(&self, at: usize) -> u32 {
        match self.0.get(at..at + 4) {
            Some(_) if self.version() >= 3 => u32_at(self.0, at),
            _ => 0,
        }
    }

    fn u64_if(&self, at: usize) -> u64 {
        u64::from(self.u32_if(at)) << 32 | u64::from(self.u32_if(at + 4))
    }

    fn header_len(&self) -> usize {
        match self.version() {
            2 => V2_LEN,
            _ => self.u32_if(100) as usize,
        }
    }
}

impl Header {
    /// Returns the number of bytes from the image's start that [`Header::parse`] needs: the cluster
    /// size. `start` is at least the image's first 72 bytes, or the whole file if that is shorter.
    pub fn len_to_read(start: &[u8]) -> Result<usize> {
        if start.len() < V2_LEN || start[..4] != MAGIC {
            return Err(Error::NotThisFormat { format: "qcow2" });
        }
        let version = u32_at(start, 4);
        if !(2..=3).contains(&version) {
            return Err(Error::unsupported(format!(
                "qcow2 version {version} is not supported, only 2 and 3"
            )));
        }
        let bits = u32_at(start, 20);
        if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&bits) {
            return Err(Error::unsupported(format!(
                "clusters of 2^{bits} bytes are not supported, only 512 bytes to 2 MiB"
            )));
        }
        Ok(1 << bits)
    }

    /// Parses the first cluster, which may be incomplete if the file is shorter. Validates every
    /// field that can be validated without further reads, except encryption, which the caller
    /// validates with [`Header::encryption`].
    pub fn parse(first: &[u8]) -> Result<Header> {
        let header = Header::parse_for_repair(first)?;
        header.validate_refcount_table()?;
        Ok(header)
    }

    /// Parses the first cluster as [`Header::parse`] does, but does not validate the refcount
    /// table, which can be rebuilt.
    pub fn parse_for_repair(first: &[u8]) -> Result<Header> {
        let cluster = Header::len_to_read(first)?;
        let first = &first[..first.len().min(cluster)];
        let fixed = Fixed(first);
        let header_len = fixed.header_len();
        if fixed.version() >= 3 && (header_len < V3_LEN || !header_len.is_multiple_of(8)) {
            return Err(Error::invalid(format!(
                "the header of {header_len} bytes is too short, or not a multiple of 8"
            )));
        }
        if header_len > first.len() {
            return Err(Error::invalid(format!(
                "the header of {header_len} bytes exceeds its first cluster"
            )));
        }
        let mut header = Header::parse_fixed(&fixed)?;
        let backing = header.parse_backing(first, header_len)?;
        let area_end = backing
            .filter(|at| *at >= header_len)
            .unwrap_or(first.len());
        header.extensions = extension::parse_all(&first[header_len..area_end])?;
        header.validate_features(fixed.u32_if(COMPRESSION_AT) >> 24, header_len)?;
        header.validate_tables()?;
        extension::validate(&header.extensions, header.autoclear, &header.geometry())?;
        Ok(header)
    }

    fn parse_fixed(fixed: &Fixed) -> Result<Header> {
        let bytes = fixed.0;
        let header_len = fixed.header_len();
        let version = fixed.version();
        let crypt_method = match u32_at(bytes, 32) {
            0 => CryptMethod::None,
            1 => CryptMethod::Aes,
            2 => CryptMethod::Luks,
            other => {
                return Err(Error::unsupported(format!(
                    "encryption method {other} is not supported"
                )));
            }
        };
        Ok(Header {
            version,
            backing_file: None,
            cluster_bits: u32_at(bytes, 20),
            size: u64_at(bytes, 24),
            crypt_method,
            l1_entries: u32_at(bytes, 36),
            l1_offset: HostOffset(u64_at(bytes, 40)),
            refcount_table_offset: HostOffset(u64_at(bytes, 48)),
            refcount_table_clusters: u32_at(bytes, 56),
            snapshots: u32_at(bytes, 60),
            snapshots_offset: HostOffset(u64_at(bytes, 64)),
            incompatible: fixed.u64_if(72),
            compatible: fixed.u64_if(80),
            autoclear: fixed.u64_if(88),
            refcount_order: if version == 2 { 4 } else { fixed.u32_if(96) },
            compression: CompressionType::Deflate,
            unknown_fields: bytes
                .get(COMPRESSION_AT + 1..header_len)
                .unwrap_or_default()
                .to_vec(),
            extensions: Vec::new(),
        })
    }

    /// Parses the backing file's name. Returns the offset of the name, if the header has one.
    fn parse_backing(&mut self, first: &[u8], header_len: usize) -> Result<Option<usize>> {
        let (offset, len) = (u64_at(first, 8), u32_at(first, 16));
        if offset == 0 {
            return Ok(None);
        }
        if len > MAX_BACKING_NAME {
            return Err(Error::invalid(format!(
                "the backing file's name has {len} bytes, more than 1023"
            )));
        }
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let name = first.get(at..at.saturating_add(len as usize));
        let Some(name) = name.filter(|_| at >= header_len) else {
            return Err(Error::invalid(format!(
                "the backing file's name at {offset} is not in the first cluster after the header"
            )));
        };
        if name.contains(&0) {
            let name = printable(name);
            return Err(Error::invalid(format!(
                "the backing file's name '{name}' is invalid"
            )));
        }
        // An empty name means that there is no backing file.
        self.backing_file = (!name.is_empty()).then(|| name.to_vec());
        Ok(Some(at))
    }

    fn validate_features(&mut self, compression: u32, header_len: usize) -> Result<()> {
        let names: Vec<_> = self
            .extensions
            .iter()
            .flat_map(Extension::feature_names)
            .collect();
        if let Some(names) = features::unknown_incompatible(self.incompatible, &names) {
            return Err(Error::unsupported(format!(
                "needs features that are not supported: {names}"
            )));
        }
        let compression = if header_len > COMPRESSION_AT {
            compression
        } else {
            0
        };
        self.compression = match compression {
            0 => CompressionType::Deflate,
            1 => CompressionType::Zstd,
            other => {
                return Err(Error::unsupported(format!(
                    "compression type {other} is not supported"
                )));
            }
        };
        if (compression != 0) != (self.incompatible & INCOMPATIBLE_COMPRESSION != 0) {
            return Err(Error::invalid(
                "its compression type contradicts the compression type feature bit",
            ));
        }
        if self.refcount_order > 6 {
            let bits = self.refcount_order;
            return Err(Error::invalid(format!(
                "refcounts of 2^{bits} bits exceed the limit of 64 bits"
            )));
        }
        if self.has(INCOMPATIBLE_EXTENDED_L2) && self.cluster_bits < MIN_EXTENDED_L2_CLUSTER_BITS {
            return Err(Error::invalid(
                "extended L2 entries need clusters of at least 16 KiB",
            ));
        }
        Ok(())
    }

    pub(crate) fn validate_tables(&self) -> Result<()> {
        let l1_bytes = u64::from(self.l1_entries) * L1Entry::SIZE;
        self.validate_table("L1 table", self.l1_offset, l1_bytes, MAX_L1_BYTES)?;
        let needed = self.geometry().l1_entries_for(self.size);
        if needed > MAX_L1_BYTES / L1Entry::SIZE {
            return Err(Error::invalid(format!(
                "a disk of {} bytes needs too large an L1 table",
                self.size
            )));
        }
        if u64::from(self.l1_entries) < needed {
            return Err(Error::invalid(format!(
                "its L1 table of {} entries is too small for its size, which needs {needed}",
                self.l1_entries
            )));
        }
        if self.snapshots > MAX_SNAPSHOTS {
            return Err(Error::invalid(format!(
                "{} snapshots exceed the limit of {MAX_SNAPSHOTS}",
                self.snapshots
            )));
        }
        let least = u64::from(self.snapshots) * super::snapshot::FIXED_LEN as u64;
        let (offset, most) = (self.snapshots_offset, MAX_SNAPSHOT_TABLE_BYTES);
        self.validate_table("snapshot table", offset, least, most)
    }

    fn validate_table(&self, what: &str, offset: HostOffset, bytes: u64, most: u64) -> Result<()> {
        if bytes > most {
            return Err(Error::invalid(format!(
                "its {what} of {bytes} bytes exceeds the limit of {most} bytes"
            )));
        }
        let end = offset.checked_add(bytes);
        let is_possible = end.is_some_and(|end| end.0 <= i64::MAX as u64);
        if !is_possible || !self.geometry().is_aligned(offset) {
            return Err(Error::invalid(format!(
                "its {what}'s offset {offset:#x} is invalid"
            )));
        }
        Ok(())
    }

    /// Validates the refcount table's offset and size.
    pub fn validate_refcount_table(&self) -> Result<()> {
        if self.refcount_table_clusters == 0 {
            return Err(Error::invalid("it has no refcount table"));
        }
        let (offset, bytes) = (self.refcount_table_offset, self.refcount_table_bytes());
        self.validate_table("refcount table", offset, bytes, MAX_REFCOUNT_TABLE_BYTES)
    }

    /// Size of the refcount table in bytes.
    pub fn refcount_table_bytes(&self) -> u64 {
        u64::from(self.refcount_table_clusters) << self.cluster_bits
    }

    /// Whether guest data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.crypt_method != CryptMethod::None
    }

    /// Returns the place of the encryption header, or `None` if guest data is not encrypted.
    ///
    /// # Errors
    ///
    /// Fails for the obsolete AES encryption, which has no encryption header, and for an invalid
    /// place.
    pub fn encryption(&self) -> Result<Option<CryptoHeader>> {
        match self.crypt_method {
            CryptMethod::None => return Ok(None),
            CryptMethod::Luks => {}
            CryptMethod::Aes => {
                return Err(Error::unsupported(
                    "AES encryption is obsolete and not supported; convert the image (qemu-img \
                     convert)",
                ));
            }
        }
        let found = self
            .extensions
            .iter()
            .find_map(|extension| match extension {
                Extension::Crypto(crypto) => Some(*crypto),
                _ => None,
            });
        let Some(crypto) = found else {
            return Err(Error::invalid(
                "encrypted, but without a pointer to its encryption header",
            ));
        };
        let is_there = self.geometry().is_aligned(crypto.offset)
            && (1..i64::MAX as u64 - LUKS_MAX).contains(&crypto.offset.0);
        match is_there && (LUKS_MIN..=LUKS_MAX).contains(&crypto.len) {
            true => Ok(Some(crypto)),
            false => Err(Error::invalid(
                "its encryption header's place or size is invalid",
            )),
        }
    }

    /// Returns the sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            refcount_order: self.refcount_order,
            extended_l2: self.has(INCOMPATIBLE_EXTENDED_L2),
            data_file: self.has(INCOMPATIBLE_DATA_FILE),
            version: self.version,
        }
    }

    fn has(&self, incompatible: u64) -> bool {
        self.incompatible & incompatible != 0
    }

    /// Whether refcounts may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.has(INCOMPATIBLE_DIRTY)
    }

    /// Whether the corrupt bit is set: software found corrupt metadata and stopped writing.
    pub fn is_corrupt(&self) -> bool {
        self.has(INCOMPATIBLE_CORRUPT)
    }

    /// Whether the external data file is a raw image by itself.
    pub fn data_file_is_raw(&self) -> bool {
        self.has(INCOMPATIBLE_DATA_FILE) && self.autoclear & AUTOCLEAR_RAW_DATA_FILE != 0
    }

    /// The format of the backing file, if the image names it.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|e| match e {
            Extension::BackingFormat(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// The name of the external data file, if the image has one.
    pub fn data_file(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|e| match e {
            Extension::DataFile(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// The bitmaps extension, if the autoclear bit marks it as consistent.
    pub fn bitmaps(&self) -> Option<&BitmapsExtension> {
        let consistent = self.autoclear & AUTOCLEAR_BITMAPS != 0;
        self.extensions.iter().find_map(|e| match e {
            Extension::Bitmaps(bitmaps) if consistent => Some(bitmaps),
            _ => None,
        })
    }

    /// Prepares the header for the first write to the image: clears unknown autoclear bits. Returns
    /// whether the header has changed.
    pub fn prepare_for_writing(&mut self) -> bool {
        let before = self.autoclear;
        self.autoclear &= AUTOCLEAR_KNOWN;
        self.autoclear != before
    }

    /// Encodes the header with its extensions and the backing file's name.
    ///
    /// # Errors
    ///
    /// Fails if the result is longer than a cluster.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; if self.version == 2 { V2_LEN } else { FULL_LEN }];
        bytes[..4].copy_from_slice(&MAGIC);
        put_u32(&mut bytes, 4, self.version);
        put_u32(&mut bytes, 20, self.cluster_bits);
        put_u64(&mut bytes, 24, self.size);
        put_u32(&mut bytes, 32, self.crypt_method as u32);
        put_u32(&mut bytes, 36, self.l1_entries);
        put_u64(&mut bytes, 40, self.l1_offset.0);
        put_u64(&mut bytes, 48, self.refcount_table_offset.0);
        put_u32(&mut bytes, 56, self.refcount_table_clusters);
        put_u32(&mut bytes, 60, self.snapshots);
        put_u64(&mut bytes, 64, self.snapshots_offset.0);
        if self.version >= 3 {
            self.encode_v3(&mut bytes);
        }
        extension::encode_all(&self.extensions, &mut bytes);
        if let Some(name) = &self.backing_file {
            let at = bytes.len() as u64;
            put_u64(&mut bytes, 8, at);
            put_u32(&mut bytes, 16, name.len() as u32);
            bytes.extend(name);
        }
        if bytes.len() > 1 << self.cluster_bits {
            let (len, cluster) = (bytes.len(), 1u32 << self.cluster_bits);
            return Err(Error::usage(format!(
                "its header would need {len} bytes, more than a cluster of {cluster}; use larger \
                 clusters or shorter names"
            )));
        }
        Ok(bytes)
    }

    fn encode_v3(&self, bytes: &mut Vec<u8>) {
        put_u64(bytes, 72, self.incompatible);
        put_u64(bytes, 80, self.compatible);
        put_u64(bytes, 88, self.autoclear);
        put_u32(bytes, 96, self.refcount_order);
        bytes[COMPRESSION_AT] = self.compression as u8;
        bytes.truncate(COMPRESSION_AT + 1);
        bytes.extend(&self.unknown_fields);
        let len = bytes.len().next_multiple_of(8).max(FULL_LEN);
        bytes.resize(len, 0);
        put_u32(bytes, 100, len as u32);
    }
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
