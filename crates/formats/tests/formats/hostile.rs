//! Random bytes: a short run of the fuzzer in every test run.

use fathom_formats::testing::fuzz;
use proptest::prelude::*;

/// A valid header of an empty disk, without extensions.
fn start(version: u8, cluster_bits: u8) -> Vec<u8> {
    let mut bytes = vec![0; if version == 2 { 72 } else { 112 }];
    (bytes[7], bytes[23], bytes[59]) = (version, cluster_bits, 1);
    if version > 2 {
        (bytes[99], bytes[103]) = (4, 112);
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn qcow2_headers(
        version in 2..4u8,
        cluster_bits in 9..22u8,
        len in prop_oneof![4 => Just(600), 1 => 0..600usize],
        changes in prop::collection::vec((0..112usize, any::<u8>()), 0..4),
    ) {
        let mut bytes = start(version, cluster_bits);
        bytes.resize(600, 0);
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(len);
        fuzz::qcow2_header(&bytes);
    }

    /// A header whose fixed fields are valid, so that its extensions are parsed.
    #[test]
    fn qcow2_extensions(tail in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..300),
                        picks in prop::collection::vec((0..300usize, 0..7usize), 0..4)) {
        let mut bytes = start(3, 9);
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

    /// Often sets the lengths of a snapshot whose parts are present.
    #[test]
    fn qcow2_tables(mut data in prop::collection::vec(any::<u8>(), 0..300), lengths: bool) {
        if let Some(entry) = data.get_mut(2..42).filter(|_| lengths) {
            for at in [12, 14, 36, 37, 38] {
                entry[at] = 0;
            }
            for at in [13, 15, 39] {
                entry[at] %= 64;
            }
        }
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

/// A compressed cluster claims the header's place. Overwriting the cluster must not free that
/// place, because later data would be written there.
#[test]
fn the_headers_place_is_not_given_up() {
    let parts: [(&[u8], usize); 4] = [
        (
            &[
                122, 128, 212, 0, 0, 10, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 1, 63, 0, 0, 0, 0, 2, 0, 0,
                0, 0, 0, 48, 0, 0, 0, 0, 32, 188, 0, 170, 68, 60, 0, 1, 64, 0, 0, 0, 0, 2, 0, 0, 0,
                0, 0, 35, 0, 0, 0, 0, 0, 0, 130, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 15, 0, 0, 0, 0, 0,
                0, 130,
            ],
            8,
        ),
        (&[7], 9),
        (
            &[
                12, 0, 0, 0, 0, 46, 80, 0, 6, 0, 0, 0, 0, 0, 0, 71, 38, 0, 179, 0, 0, 0, 0, 0, 0,
                178, 159, 0, 29, 43, 83, 8, 0, 81, 30, 56, 8, 0, 11, 43, 45, 0, 0, 0, 0, 196, 20,
                0, 85,
            ],
            61,
        ),
        (&[16, 128, 0, 64, 0], 0),
    ];
    let zeroes = |n| std::iter::repeat_n(0, n);
    let data: Vec<u8> = parts
        .iter()
        .flat_map(|(bytes, n)| bytes.iter().copied().chain(zeroes(*n)))
        .collect();
    fuzz::served_image(&data);
}
