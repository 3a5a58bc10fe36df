//! Runs the bodies of the fuzz targets with inputs from proptest.

use fathom_archive::{Manifest, encode, fuzz};
use proptest::prelude::*;

fn well_formed() -> Vec<u8> {
    let stripes = vec![None, Some(encode(b"one").hash), Some(encode(b"two").hash)];
    let manifest = Manifest::new(150_000, 64 << 10, stripes, vec![2, 1], 7);
    let bytes = manifest.expect("it fits").to_bytes();
    bytes[..bytes.len() - 32].to_vec()
}

proptest! {
    #[test]
    fn any_bytes_as_a_manifest(data: Vec<u8>) {
        fuzz::manifest(&data);
    }

    #[test]
    fn a_manifest_with_changes(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        len in 0usize..200,
    ) {
        let mut data = well_formed();
        for (at, with) in changes {
            let at = at.index(data.len());
            data[at] = with;
        }
        fuzz::manifest(&data);
        data.truncate(len);
        fuzz::manifest(&data);
    }

    #[test]
    fn any_bytes_as_a_stripe(data: Vec<u8>) {
        fuzz::stripe(&data);
    }

    #[test]
    fn a_stripe_with_changes(
        bytes in proptest::collection::vec(0u8..3, 0..2000),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut data = encode(&bytes).object;
        fuzz::stripe(&data);
        for (at, with) in changes {
            let at = at.index(data.len());
            data[at] = with;
        }
        fuzz::stripe(&data);
    }
}
