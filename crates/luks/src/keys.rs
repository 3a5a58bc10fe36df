//! Adds and removes keys.

use crate::change::Change;
use crate::effort::Effort;
use crate::error::{Error, Result};
use crate::header::{Header, Layout};
use crate::secret::{Passphrase, VolumeKey};
use crate::{v1, v2};

/// A key slot to add.
#[derive(Debug)]
pub struct Added {
    /// Number of the slot.
    pub slot: u32,
    /// Changes that the caller must write to the header.
    pub changes: Vec<Change>,
}

impl Header {
    /// Adds `passphrase` to a free slot, so that it opens the volume key `key`.
    ///
    /// `key` must be this header's volume key. Version 2 uses Argon2id as the key derivation.
    /// Blocks for about twice the effort's time.
    pub fn add_key(
        &self,
        key: &VolumeKey,
        passphrase: &Passphrase,
        effort: &Effort,
    ) -> Result<Added> {
        if !self.check(key) {
            return Err(Error::WrongVolumeKey);
        }
        let key_bytes = key.bytes().len();
        let (slot, changes) = match &self.layout {
            Layout::V1(layout) => {
                let kdf = effort.pbkdf2(self.parts.hash, key_bytes);
                v1::add(layout, &self.parts, kdf, passphrase, key)?
            }
            Layout::V2(layout) => {
                let kdf = effort.argon2id(key_bytes)?;
                v2::add(layout, &self.parts, kdf, passphrase, key)?
            }
        };
        Ok(Added { slot, changes })
    }

    /// Removes the key slot `number` and wipes its key material.
    ///
    /// Refuses to remove the last slot that opens the payload. If the changes are interrupted
    /// before the key material is wiped, the slot is free, but an old copy of the header can still
    /// use it.
    ///
    /// [`Header::find`] returns the slot number of a passphrase.
    pub fn remove_key(&self, number: u32) -> Result<Vec<Change>> {
        self.slot(number)?;
        // A slot with the priority "ignore" does not count as a remaining key, because users may
        // not know that it exists.
        if !self.tried().any(|slot| slot.number != number) {
            return Err(Error::LastKey(number));
        }
        match &self.layout {
            Layout::V1(layout) => v1::remove(layout, &self.parts, number),
            Layout::V2(layout) => v2::remove(layout, &self.parts, number),
        }
    }
}
