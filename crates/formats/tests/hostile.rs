//! Bytes that nobody meant: what the fuzzer does, for a moment in every test run.

use fathom_formats::testing::fuzz;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn qcow2_headers(data in prop::collection::vec(any::<u8>(), 0..700)) {
        fuzz::qcow2_header(&data);
    }

    /// A header whose first fields are right, so that extensions are reached.
    #[test]
    fn qcow2_extensions(tail in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..300),
                        picks in prop::collection::vec((0..300usize, 0..7usize), 0..4)) {
        let mut bytes = vec![0; 112];
        bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
        bytes[20..24].copy_from_slice(&9u32.to_be_bytes());
        bytes[56..60].copy_from_slice(&1u32.to_be_bytes());
        bytes[96..104].copy_from_slice(&[0, 0, 0, 4, 0, 0, 0, 112]);
        bytes.extend(tail);
        let kinds = [0xe279_2aca_u32, 0x6803_f857, 0x2385_2875, 0x0537_be77, 0x4441_5441, 0, 9];
        for (at, kind) in picks {
            let at = 112 + at / 8 * 8;
            if at + 8 <= bytes.len() {
                bytes[at..at + 4].copy_from_slice(&kinds[kind].to_be_bytes());
                bytes[at + 4..at + 7].fill(0);
            }
        }
        fuzz::qcow2_header(&bytes);
    }

    #[test]
    fn qcow2_tables(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::qcow2_tables(&data);
    }

    #[test]
    fn compressed_clusters(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::compressed(&data);
    }

    #[test]
    fn qcow2_images(data in prop::collection::vec(any::<u8>(), 0..60)) {
        fuzz::qcow2_image(&data);
    }

    #[test]
    fn served_images(data in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz::served_image(&data);
    }

    #[test]
    fn qed_images(data in prop::collection::vec(any::<u8>(), 0..60)) {
        fuzz::qed_image(&data);
    }
}
