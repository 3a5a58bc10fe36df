//! Adding and removing keys.

use crate::change::Change;
use crate::effort::Effort;
use crate::error::{Error, Result};
use crate::header::{Header, Layout};
use crate::secret::{Passphrase, VolumeKey};
use crate::{v1, v2};

/// A key that is to be added.
#[derive(Debug)]
pub struct Added {
    /// Its slot's number.
    pub slot: u32,
    /// To be written by the caller.
    pub changes: Vec<Change>,
}

impl Header {
    /// Makes `passphrase` open `key`, which is this header's volume key, in
    /// a free slot. In version 2 its key derivation is Argon2id. Blocks for
    /// about twice the effort's time.
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

    /// Removes the key slot `number`, unless it is the last that opens the
    /// payload, and wipes its key material. Where the changes are cut before
    /// that is wiped, the slot is free but a former copy of the header still
    /// makes use of it.
    ///
    /// The number of a passphrase's slot is what [`Header::find`] says.
    pub fn remove_key(&self, number: u32) -> Result<Vec<Change>> {
        self.slot(number)?;
        // (One that is not tried without naming it would be none that anybody has.)
        if !self.tried().any(|slot| slot.number != number) {
            return Err(Error::LastKey(number));
        }
        match &self.layout {
            Layout::V1(layout) => v1::remove(layout, &self.parts, number),
            Layout::V2(layout) => v2::remove(layout, &self.parts, number),
        }
    }
}
