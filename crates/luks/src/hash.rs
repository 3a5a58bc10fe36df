//! Hash functions that LUKS headers use.

use hmac::EagerHash;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha256, Sha512};
use std::time::Duration;

/// A hash function that a header may name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1, found only in old headers.
    Sha1,
    /// SHA-256, the default for new headers.
    #[default]
    Sha256,
    /// SHA-512.
    ///
    /// Trying passphrases with SHA-512 is slower if the processor has instructions for SHA-256.
    Sha512,
}

/// Names of all hash functions, for messages.
pub(crate) const NAMES: &str = "sha1, sha256 and sha512";

impl Hash {
    /// Returns the name of the hash in headers.
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha256 => "sha256",
            Hash::Sha512 => "sha512",
        }
    }

    /// Finds the hash with this name, which must be in lower case.
    pub fn named(name: &str) -> Option<Hash> {
        [Hash::Sha1, Hash::Sha256, Hash::Sha512]
            .into_iter()
            .find(|hash| hash.name() == name)
    }

    /// Returns the size of a digest in bytes.
    pub(crate) fn len(self) -> usize {
        match self {
            Hash::Sha1 => 20,
            Hash::Sha256 => 32,
            Hash::Sha512 => 64,
        }
    }

    /// Fills `out` using PBKDF2 (RFC 8018) with HMAC of this hash.
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

    /// Returns the approximate time of one PBKDF2 iteration on a server of the 2020s.
    ///
    /// The time applies to [`Hash::pbkdf2`] with an output of one digest's size.
    pub(crate) fn time_of_iteration(self) -> Duration {
        match self {
            Hash::Sha1 | Hash::Sha256 => Duration::from_nanos(150),
            Hash::Sha512 => Duration::from_nanos(450),
        }
    }

    /// Applies the diffusion function of the anti-forensic splitter (LUKS1 specification, section
    /// 2.4).
    ///
    /// Each piece of a digest's size is replaced by the digest of its index and its contents.
    pub(crate) fn diffuse(self, block: &mut [u8]) {
        match self {
            Hash::Sha1 => diffuse::<Sha1>(block, self.len()),
            Hash::Sha256 => diffuse::<Sha256>(block, self.len()),
            Hash::Sha512 => diffuse::<Sha512>(block, self.len()),
        }
    }

    /// Returns the digest of the concatenated `parts`.
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
