//! AES-XTS tested against the vectors of IEEE 1619 and against another implementation.

use aes::cipher::KeyInit;
use fathom_luks::{Iv, Sectors, VolumeKey};
use proptest::prelude::*;
use xts_mode::Xts128;

fn hex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits");
    (0..text.len()).step_by(2).map(digit).collect()
}

/// Checks the first bytes of the ciphertext of 0, 1, .. 255, repeated to fill one sector.
fn vector(key: &str, unit: u64, begins: &str) {
    let key = VolumeKey::new(hex(key)).unwrap();
    let plain: Vec<u8> = (0..512).map(|byte| byte as u8).collect();
    let sectors = Sectors::new(&key, 512);
    let mut area = plain.clone();
    sectors.encrypt(&mut area, unit * 512);
    assert!(area.starts_with(&hex(begins)), "{area:02x?}");
    sectors.decrypt(&mut area, unit * 512);
    assert_eq!(area, plain);
}

#[test]
fn vectors_of_the_standard() {
    // Vector 4.
    vector(
        "2718281828459045235360287471352631415926535897932384626433832795",
        0,
        "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c\
         c78cf7f5e543445f8333d8fa7f56000005279fa5d8b5e4ad40e736ddb4d35412",
    );
    // Vector 10.
    vector(
        "27182818284590452353602874713526624977572470936999595749669676273141592653589793\
         238462643383279502884197169399375105820974944592",
        0xff,
        "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b\
         5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd",
    );
}

/// Encrypts `plain` with the other implementation.
fn expected(key: &[u8], sector: usize, iv: Iv, at: u64, plain: &[u8]) -> Vec<u8> {
    let mut area = plain.to_vec();
    let (data, tweak) = key.split_at(key.len() / 2);
    for (number, part) in area.chunks_mut(sector).enumerate() {
        let unit = (at / 512 + (number * sector / 512) as u64).wrapping_add(iv.tweak);
        let unit = if iv.narrow { unit & 0xffff_ffff } else { unit };
        let iv = u128::from(unit).to_le_bytes();
        match key.len() {
            32 => {
                let new = |key| aes::Aes128::new_from_slice(key).unwrap();
                Xts128::new(new(data), new(tweak)).encrypt_sector(part, iv.into());
            }
            _ => {
                let new = |key| aes::Aes256::new_from_slice(key).unwrap();
                Xts128::new(new(data), new(tweak)).encrypt_sector(part, iv.into());
            }
        }
    }
    area
}

fn filled(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn it_is_what_others_make(
        long in any::<bool>(),
        shift in 0u32..4,
        count in 0usize..140,
        start in prop_oneof![0u64..1 << 20, Just((1 << 32) - 3), Just((1 << 52) - 200)],
        tweak in prop_oneof![Just(0), any::<u64>()],
        narrow in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let sector = 512usize << shift;
        let bytes = filled(if long { 64 } else { 32 }, seed);
        let key = VolumeKey::new(bytes.clone()).unwrap();
        let iv = Iv { tweak, narrow };
        let sectors = Sectors::new(&key, sector as u32).with_iv(iv);
        let at = start * sector as u64;
        let plain = filled(count * sector, seed.rotate_left(7));
        let other = expected(&bytes, sector, iv, at, &plain);

        let mut area = plain.clone();
        sectors.encrypt(&mut area, at);
        prop_assert_eq!(&area, &other);
        let mut copy = vec![0; plain.len()];
        sectors.encrypt_from(&plain, &mut copy, at);
        prop_assert_eq!(&copy, &other);
        sectors.decrypt_from(&area, &mut copy, at);
        prop_assert_eq!(&copy, &plain);
        sectors.decrypt(&mut area, at);
        prop_assert_eq!(&area, &plain);
    }
}

#[test]
#[should_panic(expected = "whole sectors")]
fn parts_of_sectors_are_a_mistake() {
    let key = VolumeKey::new(vec![1; 64]).unwrap();
    Sectors::new(&key, 4096).encrypt(&mut [0; 512], 0);
}

#[test]
fn sectors_are_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Sectors>();
}
