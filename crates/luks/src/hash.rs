//! The hashes of headers.

use hmac::EagerHash;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha256, Sha512};
use std::time::Duration;

/// A hash that headers may name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hash {
    /// Only in old headers.
    Sha1,
    /// What is written unless something else is asked for.
    #[default]
    Sha256,
    /// Slower to try passphrases on where a processor has instructions for
    /// SHA-256.
    Sha512,
}

/// All of them, for messages.
pub(crate) const NAMES: &str = "sha1, sha256 and sha512";

impl Hash {
    /// Its name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha256 => "sha256",
            Hash::Sha512 => "sha512",
        }
    }

    /// The one with that name, in lower case.
    pub fn named(name: &str) -> Option<Hash> {
        [Hash::Sha1, Hash::Sha256, Hash::Sha512]
            .into_iter()
            .find(|hash| hash.name() == name)
    }

    /// Bytes of a digest.
    pub(crate) fn len(self) -> usize {
        match self {
            Hash::Sha1 => 20,
            Hash::Sha256 => 32,
            Hash::Sha512 => 64,
        }
    }

    /// Fills `out` by PBKDF2 (RFC 8018) with HMAC of this hash.
    pub(crate) fn pbkdf2(self, secret: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        fn of<D: EagerHash>(secret: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
            pbkdf2::pbkdf2_hmac::<D>(secret, salt, iterations, out);
        }
        match self {
            Hash::Sha1 => of::<Sha1>(secret, salt, iterations, out),
            Hash::Sha256 => of::<Sha256>(secret, salt, iterations, out),
            Hash::Sha512 => of::<Sha512>(secret, salt, iterations, out),
        }
    }

    /// About the time of one iteration of [`Hash::pbkdf2`] for as many bytes
    /// as a digest has, on a server of the 2020s.
    pub(crate) fn time_of_iteration(self) -> Duration {
        match self {
            Hash::Sha1 | Hash::Sha256 => Duration::from_nanos(150),
            Hash::Sha512 => Duration::from_nanos(450),
        }
    }

    /// The diffusion of the anti-forensic splitter (LUKS1 spec 2.4): each
    /// piece of a digest's length becomes the digest of its number and itself.
    pub(crate) fn diffuse(self, block: &mut [u8]) {
        match self {
            Hash::Sha1 => diffuse::<Sha1>(block, self.len()),
            Hash::Sha256 => diffuse::<Sha256>(block, self.len()),
            Hash::Sha512 => diffuse::<Sha512>(block, self.len()),
        }
    }

    /// Of all `parts` in a row.
    pub(crate) fn digest(self, parts: &[&[u8]]) -> Vec<u8> {
        match self {
            Hash::Sha1 => digest::<Sha1>(parts),
            Hash::Sha256 => digest::<Sha256>(parts),
            Hash::Sha512 => digest::<Sha512>(parts),
        }
    }
}

fn diffuse<D: Digest>(block: &mut [u8], len: usize) {
    for (number, piece) in (0u32..).zip(block.chunks_mut(len)) {
        let digest = D::new()
            .chain_update(number.to_be_bytes())
            .chain_update(&*piece)
            .finalize();
        piece.copy_from_slice(&digest[..piece.len()]);
    }
}

fn digest<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
    let mut state = D::new();
    for part in parts {
        state.update(part);
    }
    state.finalize().to_vec()
}
