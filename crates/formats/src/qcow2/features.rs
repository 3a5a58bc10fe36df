//! Feature bits and their names.

/// Refcounts may be wrong: a check must come before use.
pub const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
/// Anything may be wrong: not to be written to.
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Guest data is in another file, at the guest's offsets.
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// The compression is not deflate.
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// L2 entries of 16 bytes, with subclusters.
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// All that this implementation knows.
pub(super) const INCOMPATIBLE_KNOWN: u64 = 0b1_1111;

/// Refcounts are written late, behind the dirty bit.
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;

/// The bitmaps extension is consistent.
pub const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
/// The external data file is a valid raw image by itself.
pub const AUTOCLEAR_RAW_DATA_FILE: u64 = 1 << 1;
/// Where the header has these bits (bytes).
pub const AUTOCLEAR_AT: u64 = 88;
/// All that this implementation knows.
pub(super) const AUTOCLEAR_KNOWN: u64 = 0b11;

/// Which of the header's three masks a feature's bit is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// Unknown: refuse the image.
    Incompatible,
    /// Unknown: ignore it.
    Compatible,
    /// Unknown: clear it before writing.
    Autoclear,
}

/// A row of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// The mask.
    pub kind: FeatureKind,
    /// 0 to 63.
    pub bit: u8,
    /// At most 46 bytes.
    pub name: String,
}

/// Bytes of a row.
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

/// The rows of a feature name table; those that make no sense are left out.
pub(super) fn parse_table(data: &[u8]) -> Vec<FeatureName> {
    data.chunks_exact(ROW)
        .filter_map(FeatureName::parse)
        .collect()
}

/// The table that new images get: all features by QEMU's names.
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

/// The data of a feature name table.
pub fn encode_feature_names(names: &[FeatureName]) -> Vec<u8> {
    let mut data = Vec::with_capacity(names.len() * ROW);
    for name in names {
        name.encode(&mut data);
    }
    data
}

/// The names of incompatible features that are set and unknown, for an error.
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
