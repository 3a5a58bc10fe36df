//! The header, in the image's first cluster.

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

/// The first four bytes.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The header and its extensions are in the first cluster.
pub const MAX_HEADER_LEN: usize = 1 << MAX_CLUSTER_BITS;

/// Bytes of a LUKS header of version 1 without its key slots, and more than it has with them.
const LUKS_MIN: u64 = 592;
const LUKS_MAX: u64 = 64 << 20;

const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// Where the compression type is, and where fields unknown here start.
const COMPRESSION_AT: usize = 104;
/// Length of the headers that are written: with compression type and padding.
const FULL_LEN: usize = 112;

/// How compressed clusters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionType {
    /// A raw deflate stream; QEMU calls it zlib.
    Deflate,
    /// A zstd stream.
    Zstd,
}

impl CompressionType {
    /// Its name in QEMU's options and output.
    pub fn name(self) -> &'static str {
        match self {
            CompressionType::Deflate => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CryptMethod {
    /// It is not.
    None,
    /// The old AES-CBC.
    Aes,
    /// As LUKS does it.
    Luks,
}

/// Everything in the first cluster. Public fields: whoever changes one and
/// writes the header back keeps the image consistent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file's name as it is written in the image.
    pub backing_file: Option<Vec<u8>>,
    /// log2 of the cluster size.
    pub cluster_bits: u32,
    /// The disk's size in bytes.
    pub size: u64,
    /// See [`Header::encryption`].
    pub crypt_method: CryptMethod,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Where it starts.
    pub l1_offset: HostOffset,
    /// Where the refcount table starts.
    pub refcount_table_offset: HostOffset,
    /// Its clusters.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: HostOffset,
    /// `INCOMPATIBLE_*` bits, all of them known.
    pub incompatible: u64,
    /// `COMPATIBLE_*` bits and unknown ones.
    pub compatible: u64,
    /// `AUTOCLEAR_*` bits and unknown ones: see [`Header::prepare_for_writing`].
    pub autoclear: u64,
    /// log2 of the refcounts' width.
    pub refcount_order: u32,
    /// How compressed clusters are.
    pub compression: CompressionType,
    /// What follows the known fields of a version 3 header, padding included.
    pub unknown_fields: Vec<u8>,
    /// In the order in which they are in the file.
    pub extensions: Vec<Extension>,
}

/// The fields of the fixed part, before they are believed.
struct Fixed<'a>(&'a [u8]);

impl Fixed<'_> {
    fn version(&self) -> u32 {
        u32_at(self.0, 4)
    }

    /// Of version 3; 0 where the file is too short for it.
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
    /// How many bytes from the image's start [`Header::parse`] needs, by its
    /// first 72 (or all it has).
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

    /// Parses the first cluster, of which what is missing in a short file
    /// may be missing here. Every field is checked that can be checked
    /// without further reads; encryption is left to the caller.
    pub fn parse(first: &[u8]) -> Result<Header> {
        let header = Header::parse_for_repair(first)?;
        header.validate_refcount_table()?;
        Ok(header)
    }

    /// Like [`Header::parse`], but believes nothing about the refcount table,
    /// which can be rebuilt.
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

    /// Takes the backing file's name; where it starts.
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
        // An empty name is none.
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

    /// Whether the refcount table's place can be right.
    pub fn validate_refcount_table(&self) -> Result<()> {
        if self.refcount_table_clusters == 0 {
            return Err(Error::invalid("it has no refcount table"));
        }
        let (offset, bytes) = (self.refcount_table_offset, self.refcount_table_bytes());
        self.validate_table("refcount table", offset, bytes, MAX_REFCOUNT_TABLE_BYTES)
    }

    /// Bytes of the refcount table.
    pub fn refcount_table_bytes(&self) -> u64 {
        u64::from(self.refcount_table_clusters) << self.cluster_bits
    }

    /// Guest data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.crypt_method != CryptMethod::None
    }

    /// Where the header is that says how guest data is encrypted: None, it is not. Encryption as of old, without such
    /// a header, is refused.
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

    /// Sizes that follow from the header.
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

    /// Refcounts may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.has(INCOMPATIBLE_DIRTY)
    }

    /// Somebody found something wrong, and stopped writing.
    pub fn is_corrupt(&self) -> bool {
        self.has(INCOMPATIBLE_CORRUPT)
    }

    /// The external data file is a raw image by itself.
    pub fn data_file_is_raw(&self) -> bool {
        self.has(INCOMPATIBLE_DATA_FILE) && self.autoclear & AUTOCLEAR_RAW_DATA_FILE != 0
    }

    /// The format of the backing file, where the image says it.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|e| match e {
            Extension::BackingFormat(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// The name of the external data file, where the image says it.
    pub fn data_file(&self) -> Option<&[u8]> {
        self.extensions.iter().find_map(|e| match e {
            Extension::DataFile(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// The bitmaps, if they can be believed.
    pub fn bitmaps(&self) -> Option<&BitmapsExtension> {
        let consistent = self.autoclear & AUTOCLEAR_BITMAPS != 0;
        self.extensions.iter().find_map(|e| match e {
            Extension::Bitmaps(bitmaps) if consistent => Some(bitmaps),
            _ => None,
        })
    }

    /// What must be done before the first write: unknown autoclear bits go.
    /// True when that changed the header.
    pub fn prepare_for_writing(&mut self) -> bool {
        let before = self.autoclear;
        self.autoclear &= AUTOCLEAR_KNOWN;
        self.autoclear != before
    }

    /// The header as bytes, with its extensions and the backing file's name.
    /// Fails when that is longer than a cluster.
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
