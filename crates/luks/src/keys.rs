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

/// Whether the last key may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastKey {
    /// It is [`Error::LastKey`].
    Keep,
    /// Nobody will ever read the payload again.
    Remove,
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

    /// Removes the key slot `number` and wipes its key material. Where the
    /// changes are cut before that is wiped, the slot is free but a former
    /// copy of the header still makes use of it: see [`Header::wipe_free`].
    ///
    /// The number of a passphrase's slot is what [`Header::find`] says.
    pub fn remove_key(&self, number: u32, last: LastKey) -> Result<Vec<Change>> {
        self.slot(number)?;
        // (One that is not tried without naming it would be none that anybody has.)
        let others = self.tried().any(|slot| slot.number != number);
        if !others && last == LastKey::Keep {
            return Err(Error::LastKey(number));
        }
        match &self.layout {
            Layout::V1(layout) => v1::remove(layout, &self.parts, number),
            Layout::V2(layout) => v2::remove(layout, &self.parts, number),
        }
    }

    /// Overwrites all room for key material that no slot uses, by random
    /// bytes: up to 2 MiB in version 1 and, as a rule, 16 MiB in version 2.
    pub fn wipe_free(&self) -> Result<Vec<Change>> {
        match &self.layout {
            Layout::V1(layout) => v1::wipe_free(layout, &self.parts),
            Layout::V2(layout) => v2::wipe_free(layout, &self.parts),
        }
    }
}
