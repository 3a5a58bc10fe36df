use super::*;
use crate::qcow2::feature_names;

fn header() -> Header {
    Header {
        version: 3,
        backing_file: Some(b"base.raw".to_vec()),
        cluster_bits: 16,
        size: 1 << 30,
        crypt_method: CryptMethod::None,
        l1_entries: 2,
        l1_offset: HostOffset(0x30000),
        refcount_table_offset: HostOffset(0x10000),
        refcount_table_clusters: 1,
        snapshots: 1,
        snapshots_offset: HostOffset(0x50000),
        incompatible: INCOMPATIBLE_COMPRESSION,
        compatible: 1 | 1 << 40,
        autoclear: AUTOCLEAR_BITMAPS | 1 << 50,
        refcount_order: 4,
        compression: CompressionType::Zstd,
        unknown_fields: vec![0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        extensions: vec![
            Extension::BackingFormat(b"raw".to_vec()),
            Extension::FeatureNames(features::encode_feature_names(&feature_names())),
            Extension::Bitmaps(BitmapsExtension {
                count: 1,
                reserved: 0,
                directory_size: 32,
                directory_offset: HostOffset(0x60000),
            }),
            Extension::Unknown {
                kind: 0x1234_5678,
                data: vec![1, 2, 3],
            },
        ],
    }
}

fn refused(first: &[u8], words: &str) {
    let error = Header::parse(first).expect_err(words).to_string();
    assert!(error.contains(words), "no '{words}' in: {error}");
    assert!(!error.contains('\n'));
}

#[test]
fn headers_are_read_as_they_were_written() {
    let mut h = header();
    assert_eq!(Header::parse(&h.encode().unwrap()).as_ref().unwrap(), &h);
    assert!(h.prepare_for_writing());
    assert!(!h.prepare_for_writing());
    assert_eq!(h.autoclear, AUTOCLEAR_BITMAPS);
    h = Header {
        version: 2,
        incompatible: 0,
        compatible: 0,
        autoclear: 0,
        compression: CompressionType::Deflate,
        unknown_fields: Vec::new(),
        ..h
    };
    let bytes = h.encode().unwrap();
    assert_eq!(Header::parse(&bytes).unwrap(), h);
}

#[test]
fn each_contradiction_is_told() {
    let good = header().encode().unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    refused(&good[..71], "not a qcow2");
    refused(&with(0, b"QED\0"), "not a qcow2");
    refused(&with(4, &[0, 0, 0, 4]), "version 4");
    refused(&with(4, &[0, 0, 0, 1]), "version 1");
    refused(&with(8, &[0xff; 8]), "backing file's name at");
    refused(&with(8, &8u64.to_be_bytes()), "backing file's name at");
    refused(&with(16, &[0, 0, 4, 0]), "more than 1023");
    refused(&with(20, &[0, 0, 0, 8]), "2^8");
    refused(&with(20, &[0, 0, 0, 22]), "2^22");
    refused(&with(24, &[0xff; 8]), "too large an L1");
    refused(&with(28, &[0xc0]), "too small for its size");
    refused(&with(35, &[3]), "encryption method 3");
    refused(&with(36, &[0, 0x40, 0, 1]), "L1 table of");
    refused(&with(40, &[0x80]), "L1 table's offset");
    refused(&with(46, &[1]), "L1 table's offset");
    refused(&with(47, &[1]), "L1 table's offset");
    refused(&with(55, &[1]), "refcount table's offset");
    refused(&with(56, &[0; 4]), "no refcount table");
    refused(&with(56, &[0, 0, 0, 129]), "refcount table of");
    refused(&with(60, &[0, 1, 0, 1]), "65537 snapshots");
    refused(&with(71, &[1]), "snapshot table's offset");
    refused(&with(78, &[0x80]), "bit 15");
    refused(&with(79, &[0]), "compression type");
    refused(&with(79, &[0x28]), "needs features");
    refused(&with(99, &[7]), "refcounts of 2^7");
    refused(&with(102, &[0, 100]), "100 bytes is too short");
    refused(&with(102, &[0, 105]), "multiple of 8");
    refused(&with(101, &[0xff, 0xff]), "exceeds its first cluster");
    refused(&with(104, &[2]), "compression type 2");
    refused(&with(124, &[0, 0, 0xff, 0]), "does not fit");
    let parsed = Header::parse(&with(35, &[2])).unwrap();
    let error = parsed.encryption().unwrap_err().to_string();
    assert!(
        error.contains("pointer to its encryption header"),
        "{error}"
    );
}

#[test]
fn unknown_features_are_told_by_the_images_own_names() {
    let mut h = header();
    let name = features::FeatureName {
        kind: features::FeatureKind::Incompatible,
        bit: 33,
        name: "time travel".into(),
    };
    h.extensions[1] = Extension::FeatureNames(features::encode_feature_names(&[name]));
    h.incompatible |= 1 << 33 | 1 << 34;
    refused(&h.encode().unwrap(), "time travel, bit 34");
}

#[test]
fn extensions_contradict_themselves_only_when_they_count() {
    let broken = BitmapsExtension {
        count: 0,
        reserved: 0,
        directory_size: 32,
        directory_offset: HostOffset(0x60000),
    };
    let mut h = header();
    h.extensions[2] = Extension::Bitmaps(broken);
    refused(&h.encode().unwrap(), "no bitmaps");
    h.autoclear = 0;
    assert!(
        Header::parse(&h.encode().unwrap())
            .unwrap()
            .bitmaps()
            .is_none()
    );
    h.extensions.push(Extension::DataFile(b"a\0b".to_vec()));
    refused(&h.encode().unwrap(), "data file's name");
    h.extensions.pop();
    h.extensions.push(Extension::BackingFormat(b"raw".to_vec()));
    let last = Header::parse(&h.encode().unwrap()).unwrap();
    assert_eq!(last.backing_format(), Some(&b"raw"[..]));
    assert_eq!(last.extensions.len(), h.extensions.len() - 1);
}

#[test]
fn a_header_that_does_not_fit_is_refused() {
    let mut h = header();
    h.cluster_bits = 9;
    h.backing_file = Some(vec![b'a'; 300]);
    assert!(h.encode().is_err());
}
