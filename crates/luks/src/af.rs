//! The anti-forensic splitter (LUKS1 specification, section 2.4).
//!
//! The splitter expands a key so that wiping any part of the expanded key destroys the whole key.

use crate::error::Result;
use crate::hash::Hash;
use crate::random;
use zeroize::Zeroizing;

/// Number of stripes into which a key is split. Every known program uses this number.
pub const STRIPES: usize = 4000;

/// Returns the size in bytes of a split key of `key_bytes` bytes.
///
/// For keys of 32 and 64 bytes, the size is a multiple of 512.
pub const fn split_len(key_bytes: usize) -> usize {
    key_bytes * STRIPES
}

/// Splits `key` into [`STRIPES`] stripes, all but the last of them random.
pub fn split(key: &[u8], hash: Hash) -> Result<Zeroizing<Vec<u8>>> {
    let mut material = Zeroizing::new(vec![0; split_len(key.len())]);
    let (last, stripes) = (split_len(key.len()) - key.len(), STRIPES - 1);
    random::fill(&mut material[..last])?;
    let mut sum = sum(&material, key.len(), stripes, hash);
    xor(&mut sum, key);
    material[last..].copy_from_slice(&sum);
    Ok(material)
}

/// Recovers the key of `key_bytes` bytes that was split into `material`.
pub fn merge(material: &[u8], key_bytes: usize, hash: Hash) -> Zeroizing<Vec<u8>> {
    let mut key = sum(material, key_bytes, STRIPES - 1, hash);
    xor(
        &mut key,
        &material[(STRIPES - 1) * key_bytes..][..key_bytes],
    );
    key
}

/// Computes the diffused XOR of the first `stripes` stripes.
fn sum(material: &[u8], key_bytes: usize, stripes: usize, hash: Hash) -> Zeroizing<Vec<u8>> {
    let mut sum = Zeroizing::new(vec![0; key_bytes]);
    for stripe in material.chunks_exact(key_bytes).take(stripes) {
        xor(&mut sum, stripe);
        hash.diffuse(&mut sum);
    }
    sum
}

fn xor(to: &mut [u8], with: &[u8]) {
    for (to, with) in to.iter_mut().zip(with) {
        *to ^= with;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_split_is_merged() {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            for len in [32, 64] {
                let key: Vec<u8> = (0..len).collect();
                let material = split(&key, hash).unwrap();
                assert_eq!(*merge(&material, key.len(), hash), key);
            }
        }
    }

    #[test]
    fn one_wrong_bit_makes_another_key() {
        let key = [7; 64];
        let mut material = split(&key, Hash::Sha256).unwrap();
        material[1000] ^= 1;
        assert_ne!(*merge(&material, key.len(), Hash::Sha256), key);
    }
}
