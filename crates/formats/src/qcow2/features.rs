//! Feature bits and their names.

/// Incompatible feature bit: refcounts may be wrong, so the image must be checked before use.
pub const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
/// Incompatible feature bit: any metadata may be wrong, so the image must not be written to.
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Incompatible feature bit: guest data is in an external data file, at the guest's offsets.
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// Incompatible feature bit: the compression type is not deflate.
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// Incompatible feature bit: L2 entries have 16 bytes, with subcluster bitmaps.
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// All incompatible feature bits that this implementation supports.
pub(super) const INCOMPATIBLE_KNOWN: u64 = 0b1_1111;

/// Compatible feature bit: refcounts may be written late, while the dirty bit is set.
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;

/// Autoclear feature bit: the bitmaps extension is consistent with the image.
pub const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
/// Autoclear feature bit: the external data file is a valid raw image by itself.
pub const AUTOCLEAR_RAW_DATA_FILE: u64 = 1 << 1;
/// Byte offset of the autoclear feature bits in the header.
pub const AUTOCLEAR_AT: u64 = 88;
/// All autoclear feature bits that this implementation supports.
pub(super) const AUTOCLEAR_KNOWN: u64 = 0b11;

/// The header field that holds a feature's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// An image with an unknown bit of this kind must be refused.
    Incompatible,
    /// An unknown bit of this kind is ignored.
    Compatible,
    /// An unknown bit of this kind must be cleared before the first write.
    Autoclear,
}

/// An entry of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// The field that holds the bit.
    pub kind: FeatureKind,
    /// The bit's number, 0 to 63.
    pub bit: u8,
    /// The feature's name, at most 46 bytes.
    pub name: String,
}

/// Size of an entry in bytes.
const ROW: usize = 48;

impl FeatureName {
    fn parse(row: &[u8]) -> Option<FeatureName> {
        let kind = match row[0] {
            0 => FeatureKind::Incompatible,
            1 => FeatureKind::Compatible,
            2 => FeatureKind::Autoclear,
            _ => return None,
        };
        let name = row[2..].split(|b| *b == 0).next().unwrap_or_default();
        (row[1] < 64).then(|| FeatureName {
            kind,
            bit: row[1],
            name: super::bytes::printable(name),
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let mut row = [0; ROW];
        row[0] = self.kind as u8;
        row[1] = self.bit;
        let len = self.name.len().min(ROW - 2);
        row[2..2 + len].copy_from_slice(&self.name.as_bytes()[..len]);
        out.extend_from_slice(&row);
    }
}

/// Parses a feature name table. Entries with an unknown kind or bit number are skipped.
pub(super) fn parse_table(data: &[u8]) -> Vec<FeatureName> {
    data.chunks_exact(ROW)
        .filter_map(FeatureName::parse)
        .collect()
}

/// Returns the table that new images get: all features, by QEMU's names.
pub fn feature_names() -> Vec<FeatureName> {
    use FeatureKind::{Autoclear, Compatible, Incompatible};
    [
        (Incompatible, 0, "dirty bit"),
        (Incompatible, 1, "corrupt bit"),
        (Incompatible, 2, "external data file"),
        (Incompatible, 3, "compression type"),
        (Incompatible, 4, "extended L2 entries"),
        (Compatible, 0, "lazy refcounts"),
        (Autoclear, 0, "bitmaps"),
        (Autoclear, 1, "raw external data"),
    ]
    .into_iter()
    .map(|(kind, bit, name)| FeatureName {
        kind,
        bit,
        name: name.to_owned(),
    })
    .collect()
}

/// Encodes a feature name table.
pub fn encode_feature_names(names: &[FeatureName]) -> Vec<u8> {
    let mut data = Vec::with_capacity(names.len() * ROW);
    for name in names {
        name.encode(&mut data);
    }
    data
}

/// Returns the names of the unknown incompatible features that are set, for an error message.
pub(super) fn unknown_incompatible(bits: u64, table: &[FeatureName]) -> Option<String> {
    let unknown = bits & !INCOMPATIBLE_KNOWN;
    let name_of = |bit: u8| {
        table
            .iter()
            .find(|f| f.kind == FeatureKind::Incompatible && f.bit == bit)
            .map_or_else(|| format!("bit {bit}"), |f| f.name.clone())
    };
    let names: Vec<_> = (0..64)
        .filter(|bit| unknown >> bit & 1 == 1)
        .map(name_of)
        .collect();
    (!names.is_empty()).then(|| names.join(", "))
}
