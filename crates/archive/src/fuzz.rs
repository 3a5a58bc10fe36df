//! The bodies of fuzz targets: what an archive may hold, as functions of bytes.

use crate::hash::Hash;
use crate::manifest::Manifest;
use crate::stripe::{decode, unpack};

/// A manifest: as it is, and with a checksum that fits. What was parsed is written back the same.
///
/// # Panics
/// When it is not.
pub fn manifest(data: &[u8]) {
    let sealed = [data, &Hash::of(data).0].concat();
    for bytes in [data, &sealed] {
        if let Ok(manifest) = Manifest::parse(bytes) {
            assert_eq!(manifest.to_bytes(), bytes);
            let lens = (0..manifest.stripes().len() as u32).map(|index| manifest.len_of(index));
            assert_eq!(lens.map(|len| len as u64).sum::<u64>(), manifest.size());
        }
    }
}

/// A stripe, of as many bytes as it says if those are few. What comes out of it has that length.
///
/// # Panics
/// When it has not.
pub fn stripe(data: &[u8]) {
    let said = data.get(8..12).and_then(|word| word.first_chunk());
    let said = said.map_or(0, |word| u32::from_le_bytes(*word) as usize);
    for len in [said.min(1 << 20), data.len()] {
        if let Ok(bytes) = unpack(data, len) {
            assert_eq!(bytes.len(), len);
            assert_eq!(decode(data, len, &Hash::of(&bytes)), Ok(bytes));
        }
        assert!(decode(data, len, &Hash([1; 32])).is_err());
    }
}
