//! Key slots, as used by both header versions.

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

/// Size of a salt in bytes.
pub const SALT: usize = 32;
/// Size of a sector of key material in bytes.
pub const SECTOR: u32 = 512;

/// A key slot in use.
#[derive(Clone, Debug)]
pub struct Slot {
    pub number: u32,
    pub kdf: Kdf,
    pub salt: [u8; SALT],
    /// Hash of the anti-forensic splitter.
    pub af_hash: Hash,
    pub area: Area,
    /// Slots with a higher priority are tried first.
    pub priority: Priority,
    /// The reason why no passphrase can be tried on this slot, if there is one.
    pub unusable: Option<String>,
}

/// Priority with which a slot is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Tried only when the caller names the slot.
    Ignore,
    Normal,
    Prefer,
}

/// The location of a slot's key material and the way it is encrypted.
#[derive(Clone, Debug)]
pub struct Area {
    /// Offset in bytes from the start of the header.
    pub at: u64,
    /// Size of the area in bytes; the key material may occupy only its start.
    pub len: u64,
    /// Size in bytes of the key that encrypts the key material.
    pub key_bytes: usize,
    pub iv: Iv,
}

impl Slot {
    /// Decrypts the slot and returns its key of `key_bytes` bytes.
    ///
    /// If `passphrase` is wrong, the result is a different key. The caller must check the key
    /// against the header's digest.
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

    /// Returns the encrypted key material from which [`Slot::open`] recovers `key`.
    pub fn seal(&self, passphrase: &Passphrase, key: &VolumeKey) -> Result<Vec<u8>> {
        let mut material = af::split(key.bytes(), self.af_hash)?;
        self.sectors(passphrase)?.encrypt(&mut material, 0);
        Ok(std::mem::take(&mut *material))
    }

    /// Estimates the time to try a passphrase on this slot.
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

/// The digest that identifies the right volume key.
#[derive(Clone, Debug)]
pub struct Digest {
    pub kdf: Kdf,
    pub salt: [u8; SALT],
    pub value: Vec<u8>,
}

impl Digest {
    /// Returns whether this is the digest of `key`. The time does not depend on the result.
    pub fn is_of(&self, key: &VolumeKey) -> Result<bool> {
        let mut value = vec![0; self.value.len()];
        self.kdf.derive(key.bytes(), &self.salt, &mut value)?;
        Ok(value.ct_eq(&self.value).into())
    }

    /// Estimates the time of [`Digest::is_of`].
    pub fn time(&self) -> std::time::Duration {
        self.kdf.time(self.value.len())
    }
}
