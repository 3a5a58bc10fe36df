//! Passphrases and volume keys.
//!
//! Both are excluded from core dumps, locked against swapping where the process may lock memory,
//! and wiped when they are dropped. The `Debug` output of both shows no secret.

use crate::error::{Error, Result};
use crate::guarded::GuardedBytes;
use std::fmt;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Maximum size of a passphrase or key file in bytes, as in cryptsetup.
pub const MAX_PASSPHRASE: usize = 8 << 20;

/// A passphrase, or the contents of a key file, byte for byte.
///
/// A line feed at the end belongs to the passphrase.
pub struct Passphrase(GuardedBytes);

impl Passphrase {
    /// Takes ownership of `bytes`: 1 to [`MAX_PASSPHRASE`] bytes.
    pub fn new(bytes: Vec<u8>) -> Result<Passphrase> {
        let bytes = Zeroizing::new(bytes);
        match bytes.len() {
            0 => Err(Error::PassphraseEmpty),
            1..=MAX_PASSPHRASE => Ok(Passphrase(GuardedBytes::copy_of(&bytes))),
            _ => Err(Error::PassphraseTooLong),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(..)")
    }
}

/// The key of a payload: 32 bytes for AES-128 in XTS mode, 64 bytes for AES-256.
pub struct VolumeKey(GuardedBytes);

impl VolumeKey {
    /// Takes ownership of `bytes`: 32 or 64 bytes.
    pub fn new(bytes: Vec<u8>) -> Result<VolumeKey> {
        let bytes = Zeroizing::new(bytes);
        match bytes.len() {
            32 | 64 => Ok(VolumeKey(GuardedBytes::copy_of(&bytes))),
            len => Err(Error::unsupported(format!(
                "volume keys of {len} bytes are not supported, only of 32 and 64 bytes"
            ))),
        }
    }

    /// Returns the raw key, for callers that store or compare keys.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeKey(..)")
    }
}

impl PartialEq for VolumeKey {
    /// Compares in a time that depends only on the lengths of the keys.
    fn eq(&self, other: &VolumeKey) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for VolumeKey {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_nothing() {
        let passphrase = Passphrase::new(b"secret".to_vec()).unwrap();
        let key = VolumeKey::new(vec![7; 64]).unwrap();
        assert_eq!(format!("{passphrase:?}"), "Passphrase(..)");
        assert_eq!(format!("{key:?}"), "VolumeKey(..)");
    }

    #[test]
    fn secrets_are_left_out_of_core_files() {
        let passphrase = Passphrase::new(b"secret".to_vec()).unwrap();
        let key = VolumeKey::new(vec![7; 64]).unwrap();
        for bytes in [passphrase.bytes(), key.bytes()] {
            let flags = crate::guarded::flags_of(bytes.as_ptr());
            assert!(flags.contains(" dd "), "{flags}");
        }
    }

    #[test]
    fn lengths_are_bounded() {
        assert!(Passphrase::new(Vec::new()).is_err());
        assert!(Passphrase::new(vec![1; MAX_PASSPHRASE]).is_ok());
        assert!(Passphrase::new(vec![1; MAX_PASSPHRASE + 1]).is_err());
        for len in [0, 16, 31, 33, 63, 65, 128] {
            assert!(VolumeKey::new(vec![0; len]).is_err(), "{len}");
        }
    }
}
