//! Header extensions.

use super::bytes::{printable, u32_at, u64_at};
use super::features::{AUTOCLEAR_BITMAPS, FeatureName, parse_table};
use super::{Geometry, bitmap};
use crate::{Error, HostOffset, Result};

const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const CRYPTO: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;

/// A header extension. Unknown extensions keep their bytes, so that rewriting a header loses
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extension {
    /// The name of the backing file's format.
    BackingFormat(Vec<u8>),
    /// The feature name table. See [`Extension::feature_names`].
    FeatureNames(Vec<u8>),
    /// The place of the bitmap directory.
    Bitmaps(BitmapsExtension),
    /// The place of the encryption header.
    Crypto(CryptoHeader),
    /// The name of the external data file.
    DataFile(Vec<u8>),
    /// Any other extension.
    Unknown {
        /// Type number of the extension.
        kind: u32,
        /// Data of the extension, without padding.
        data: Vec<u8>,
    },
}

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of entries of the bitmap directory.
    pub count: u32,
    /// Reserved field, which must be 0.
    pub reserved: u32,
    /// Size of the bitmap directory in bytes.
    pub directory_size: u64,
    /// Where the bitmap directory starts.
    pub directory_offset: HostOffset,
}

/// The full disk encryption header pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CryptoHeader {
    /// Where the encryption header starts.
    pub offset: HostOffset,
    /// Length of the encryption header in bytes.
    pub len: u64,
}

impl BitmapsExtension {
    const LEN: usize = 24;

    fn parse(data: &[u8]) -> Result<BitmapsExtension> {
        if data.len() != Self::LEN {
            let len = data.len();
            return Err(Error::invalid(format!(
                "the bitmaps extension has {len} bytes instead of 24"
            )));
        }
        Ok(BitmapsExtension {
            count: u32_at(data, 0),
            reserved: u32_at(data, 4),
            directory_size: u64_at(data, 8),
            directory_offset: HostOffset(u64_at(data, 16)),
        })
    }

    /// Validates the fields, which have a meaning only if the bitmaps feature bit is set.
    pub fn validate(&self, geometry: &Geometry) -> Result<()> {
        let invalid = |problem: &str| Err(Error::invalid(format!("bitmaps extension: {problem}")));
        if self.reserved != 0 {
            invalid("its reserved field is not 0")
        } else if self.count == 0 {
            invalid("it has no bitmaps")
        } else if self.count > bitmap::MAX_BITMAPS {
            invalid("more than 65535 bitmaps")
        } else if self.directory_size > bitmap::MAX_DIRECTORY_BYTES {
            invalid("its directory is too large")
        } else if !geometry.is_aligned(self.directory_offset)
            || self.directory_offset.0 == 0
            || self.directory_offset.0 > i64::MAX as u64 - bitmap::MAX_DIRECTORY_BYTES
        {
            invalid("its directory's offset is invalid")
        } else {
            Ok(())
        }
    }
}

impl Extension {
    fn parse(kind: u32, data: &[u8]) -> Result<Extension> {
        Ok(match kind {
            BACKING_FORMAT => Extension::BackingFormat(data.to_vec()),
            FEATURE_NAMES => Extension::FeatureNames(data.to_vec()),
            BITMAPS => Extension::Bitmaps(BitmapsExtension::parse(data)?),
            CRYPTO if data.len() == 16 => Extension::Crypto(CryptoHeader {
                offset: HostOffset(u64_at(data, 0)),
                len: u64_at(data, 8),
            }),
            CRYPTO => return Err(Error::invalid("the encryption header extension is invalid")),
            DATA_FILE => Extension::DataFile(data.to_vec()),
            _ => Extension::Unknown {
                kind,
                data: data.to_vec(),
            },
        })
    }

    /// Returns the entries of a feature name table; no entries for any other extension.
    pub fn feature_names(&self) -> Vec<FeatureName> {
        match self {
            Extension::FeatureNames(data) => parse_table(data),
            _ => Vec::new(),
        }
    }

    fn kind(&self) -> u32 {
        match self {
            Extension::BackingFormat(_) => BACKING_FORMAT,
            Extension::FeatureNames(_) => FEATURE_NAMES,
            Extension::Bitmaps(_) => BITMAPS,
            Extension::Crypto(_) => CRYPTO,
            Extension::DataFile(_) => DATA_FILE,
            Extension::Unknown { kind, .. } => *kind,
        }
    }

    fn data(&self) -> Vec<u8> {
        match self {
            Extension::Bitmaps(b) => {
                let mut data = Vec::with_capacity(BitmapsExtension::LEN);
                data.extend(b.count.to_be_bytes());
                data.extend(b.reserved.to_be_bytes());
                data.extend(b.directory_size.to_be_bytes());
                data.extend(b.directory_offset.0.to_be_bytes());
                data
            }
            Extension::Crypto(c) => {
                let numbers = [c.offset.0, c.len];
                numbers.iter().flat_map(|n| n.to_be_bytes()).collect()
            }
            Extension::BackingFormat(data)
            | Extension::FeatureNames(data)
            | Extension::DataFile(data)
            | Extension::Unknown { data, .. } => data.clone(),
        }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let data = self.data();
        out.extend(self.kind().to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(&data);
        out.resize(out.len().next_multiple_of(8), 0);
    }
}

/// Parses all extensions in `area`, which starts after the header's fields and ends where the
/// backing file's name or the cluster ends.
pub(super) fn parse_all(area: &[u8]) -> Result<Vec<Extension>> {
    let mut extensions: Vec<Extension> = Vec::new();
    let mut rest = area;
    while rest.len() >= 8 {
        let kind = u32_at(rest, 0);
        let len = u32_at(rest, 4) as usize;
        if kind == END {
            break;
        }
        rest = &rest[8..];
        let Some(data) = rest.get(..len) else {
            return Err(Error::invalid(format!(
                "header extension {kind:#x} of {len} bytes does not fit before its area's end"
            )));
        };
        let extension = Extension::parse(kind, data)?;
        // If a known extension occurs twice, the last one counts, as in QEMU.
        if !matches!(extension, Extension::Unknown { .. }) {
            extensions.retain(|e| e.kind() != kind);
        }
        extensions.push(extension);
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(extensions)
}

pub(super) fn encode_all(extensions: &[Extension], out: &mut Vec<u8>) {
    for extension in extensions {
        extension.encode(out);
    }
    out.extend([0; 8]);
}

/// Validates the extensions against the header.
pub(super) fn validate(extensions: &[Extension], autoclear: u64, g: &Geometry) -> Result<()> {
    let bitmaps = extensions.iter().find_map(|e| match e {
        Extension::Bitmaps(bitmaps) => Some(bitmaps),
        _ => None,
    });
    if autoclear & AUTOCLEAR_BITMAPS != 0
        && let Some(bitmaps) = bitmaps
    {
        bitmaps.validate(g)?;
    }
    for extension in extensions {
        let (what, name) = match extension {
            Extension::BackingFormat(name) => ("backing format", name),
            Extension::DataFile(name) => ("data file", name),
            _ => continue,
        };
        if name.contains(&0) {
            let name = printable(name);
            return Err(Error::invalid(format!(
                "the {what}'s name '{name}' is invalid"
            )));
        }
    }
    Ok(())
}
