//! Key slots, as both versions of headers have them.

use crate::af;
use crate::bytes::Bytes;
use crate::error::Result;
use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::payload::Iv;
use crate::secret::{Passphrase, VolumeKey};
use crate::xts::Sectors;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Bytes of every salt.
pub const SALT: usize = 32;
/// Bytes of a sector of key material.
pub const SECTOR: u32 = 512;

/// A slot in use.
#[derive(Clone, Debug)]
pub struct Slot {
    pub number: u32,
    pub kdf: Kdf,
    pub salt: [u8; SALT],
    /// Of the anti-forensic splitter.
    pub af_hash: Hash,
    pub area: Area,
    /// Those of a higher one are tried first.
    pub priority: Priority,
    /// Why no passphrase is tried on it, if so.
    pub unusable: Option<String>,
}

/// When a slot is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Only when it is asked for.
    Ignore,
    Normal,
    Prefer,
}

/// Where a slot's key material is and how it is encrypted.
#[derive(Clone, Debug)]
pub struct Area {
    /// Bytes from the header's start.
    pub at: u64,
    /// Of which the material may be the start.
    pub len: u64,
    /// Bytes of the key that encrypts it.
    pub key_bytes: usize,
    pub iv: Iv,
}

impl Slot {
    /// The key of `key_bytes` in it, if `passphrase` is the slot's; otherwise
    /// some other key.
    pub fn open(
        &self,
        bytes: &dyn Bytes,
        passphrase: &Passphrase,
        key_bytes: usize,
    ) -> Result<VolumeKey> {
        let mut material = Zeroizing::new(vec![0; af::split_len(key_bytes)]);
        bytes.read_at(&mut material, self.area.at)?;
        self.sectors(passphrase)?.decrypt(&mut material, 0);
        let mut key = af::merge(&material, key_bytes, self.af_hash);
        VolumeKey::new(std::mem::take(&mut *key))
    }

    /// The material that makes [`Slot::open`] find `key`.
    pub fn seal(&self, passphrase: &Passphrase, key: &VolumeKey) -> Result<Vec<u8>> {
        let mut material = af::split(key.bytes(), self.af_hash)?;
        self.sectors(passphrase)?.encrypt(&mut material, 0);
        Ok(std::mem::take(&mut *material))
    }

    /// About the time to try a passphrase on it.
    pub fn time(&self) -> std::time::Duration {
        self.kdf.time(self.area.key_bytes)
    }

    fn sectors(&self, passphrase: &Passphrase) -> Result<Sectors> {
        let mut key = Zeroizing::new(vec![0; self.area.key_bytes]);
        self.kdf.derive(passphrase.bytes(), &self.salt, &mut key)?;
        let key = VolumeKey::new(std::mem::take(&mut *key))?;
        Ok(Sectors::new(&key, SECTOR).with_iv(self.area.iv))
    }
}

/// By what a volume key is known to be the right one.
#[derive(Clone, Debug)]
pub struct Digest {
    pub kdf: Kdf,
    pub salt: [u8; SALT],
    pub value: Vec<u8>,
}

impl Digest {
    /// Whether it is `key`'s, in a time that does not depend on the answer.
    pub fn is_of(&self, key: &VolumeKey) -> Result<bool> {
        let mut value = vec![0; self.value.len()];
        self.kdf.derive(key.bytes(), &self.salt, &mut value)?;
        Ok(value.ct_eq(&self.value).into())
    }

    /// About the time of [`Digest::is_of`].
    pub fn time(&self) -> std::time::Duration {
        self.kdf.time(self.value.len())
    }
}
