//! The bodies of fuzz targets: functions that take arbitrary bytes as the contents of an archive.

use crate::hash::Hash;
use crate::manifest::Manifest;
use crate::stripe::{decode, unpack};

/// Parses `data` as a manifest, both as it is and with a valid checksum appended.
///
/// A manifest that was parsed must encode to the same bytes.
///
/// # Panics
/// Panics if it does not.
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

/// Decodes `data` as a stripe.
///
/// The expected size is the one in its header, up to 1 MiB, and the size of `data`. A stripe that
/// was decoded must have the expected size.
///
/// # Panics
/// Panics if it does not.
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
