//! What must not be seen: passphrases and keys. They are left out of core files, kept from swap where that
//! is allowed, and wiped when they are dropped, and their `Debug` shows nothing.

use crate::error::{Error, Result};
use crate::guarded::GuardedBytes;
use std::fmt;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Bytes of the longest passphrase or key file, as in cryptsetup.
pub const MAX_PASSPHRASE: usize = 8 << 20;

/// What opens a key slot: a passphrase or the content of a key file, byte
/// for byte. A line feed at the end is a part of it.
pub struct Passphrase(GuardedBytes);

impl Passphrase {
    /// Takes over `bytes`: 1 to [`MAX_PASSPHRASE`] of them.
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

/// The key of a payload: 32 bytes for AES-128 in XTS mode, 64 for AES-256.
pub struct VolumeKey(GuardedBytes);

impl VolumeKey {
    /// Takes over `bytes`: 32 or 64 of them.
    pub fn new(bytes: Vec<u8>) -> Result<VolumeKey> {
        let bytes = Zeroizing::new(bytes);
        match bytes.len() {
            32 | 64 => Ok(VolumeKey(GuardedBytes::copy_of(&bytes))),
            len => Err(Error::unsupported(format!(
                "volume keys of {len} bytes are not supported, only of 32 and 64 bytes"
            ))),
        }
    }

    /// The key itself, for whoever has to store or compare it.
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
    /// In a time that depends only on the keys' lengths.
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
