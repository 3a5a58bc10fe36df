//! A LUKS header of version 1 or 2.

use crate::bytes::{Bytes, u16_at};
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::kdf::MAX_TIME;
use crate::parts::Parts;
use crate::payload::Payload;
use crate::secret::{Passphrase, VolumeKey};
use crate::slot::{Priority, Slot};
use crate::{v1, v2};
use std::time::Duration;

/// A header that has been read and checked.
///
/// The header is a snapshot: after a change, the caller must read the header again.
#[derive(Clone, Debug)]
pub struct Header {
    pub(crate) parts: Parts,
    pub(crate) layout: Layout,
}

/// The data that only one version has.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    V1(Box<v1::Layout>),
    V2(Box<v2::Layout>),
}

impl Header {
    /// Number of bytes that [`Header::is_luks`] needs.
    pub const START: usize = 8;

    /// Returns whether a file that starts with `start` has a LUKS header of any version there.
    pub fn is_luks(start: &[u8]) -> bool {
        start.starts_with(&v1::fields::MAGIC)
    }

    /// Reads the header at the start of `bytes` and checks every field.
    ///
    /// Uses at most about 100 MiB of memory, even for a malicious header.
    pub fn read(bytes: &dyn Bytes) -> Result<Header> {
        let mut start = [0; Header::START];
        bytes
            .read_at(&mut start, 0)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => Error::NotLuks,
                _ => Error::Io(error),
            })?;
        match u16_at(&start, v1::fields::VERSION) {
            1 if Header::is_luks(&start) => {
                let (parts, layout) = v1::read(bytes)?;
                let layout = Layout::V1(Box::new(layout));
                Ok(Header { parts, layout })
            }
            version if version != 2 && Header::is_luks(&start) => Err(Error::unsupported(format!(
                "LUKS version {version} is not supported, only 1 and 2"
            ))),
            // The second copy of a LUKS2 header may be intact even if the first one has been
            // overwritten.
            _ => {
                let (parts, layout) = v2::read(bytes).map_err(|error| match error {
                    Error::NotLuks if Header::is_luks(&start) => {
                        Error::damaged("the checksums of both of its copies are wrong")
                    }
                    error => error,
                })?;
                let layout = Layout::V2(Box::new(layout));
                Ok(Header { parts, layout })
            }
        }
    }

    /// Returns the LUKS version: 1 or 2.
    pub fn version(&self) -> u32 {
        match self.layout {
            Layout::V1(_) => 1,
            Layout::V2(_) => 2,
        }
    }

    /// Returns the location and format of the encrypted data.
    pub fn payload(&self) -> Payload {
        self.parts.payload
    }

    /// Returns the UUID as stored in the header.
    pub fn uuid(&self) -> &str {
        &self.parts.uuid
    }

    /// Returns the volume key using the passphrase of any slot; see [`Header::find`].
    pub fn unlock(&self, bytes: &dyn Bytes, passphrase: &Passphrase) -> Result<VolumeKey> {
        Ok(self.find(bytes, passphrase)?.0)
    }

    /// Returns the volume key and the number of the slot that `passphrase` opens.
    ///
    /// Tries the slots in use, ordered by priority and number. Slots with the priority "ignore" are
    /// skipped. Blocks during the key derivations, for about a minute at most.
    ///
    /// # Errors
    ///
    /// - [`Error::TooSlow`] if trying the next slot would exceed that time.
    /// - [`Error::WrongKey`] if no slot accepts the passphrase; the caller may try another one.
    pub fn find(&self, bytes: &dyn Bytes, passphrase: &Passphrase) -> Result<(VolumeKey, u32)> {
        let mut slots: Vec<&Slot> = self.tried().collect();
        if slots.is_empty() {
            return Err(self.nothing_to_try());
        }
        slots.sort_by_key(|slot| std::cmp::Reverse(slot.priority));
        let mut spent = Duration::ZERO;
        for slot in slots {
            let time = slot.time() + self.parts.digest.time();
            if !spent.is_zero() && spent + time > MAX_TIME {
                return Err(Error::TooSlow { slot: slot.number });
            }
            spent += time;
            if let Some(key) = self.open(slot, bytes, passphrase)? {
                return Ok((key, slot.number));
            }
        }
        Err(Error::WrongKey)
    }

    /// Returns the volume key using only the passphrase of slot `number`.
    pub fn unlock_slot(
        &self,
        bytes: &dyn Bytes,
        passphrase: &Passphrase,
        number: u32,
    ) -> Result<VolumeKey> {
        let slot = self.slot(number)?;
        if let Some(why) = &slot.unusable {
            return Err(cannot_open(slot, why));
        }
        self.open(slot, bytes, passphrase)?.ok_or(Error::WrongKey)
    }

    /// Returns whether `key` is the volume key of this header.
    ///
    /// Computes the digest, which takes about 0.1 s.
    pub fn check(&self, key: &VolumeKey) -> bool {
        key.bytes().len() == self.parts.payload.key_bytes
            && self.parts.digest.is_of(key).unwrap_or(false)
    }

    /// Returns a fingerprint that identifies the volume key of this header.
    ///
    /// The fingerprint covers the header's digest, its salt and the UUID. A caller can use it to
    /// check that a volume key from an earlier unlock still belongs to the header. Adding and
    /// removing keys does not change the fingerprint.
    pub fn fingerprint(&self) -> [u8; 32] {
        let digest = &self.parts.digest;
        let parts = [&digest.salt, &digest.value[..], self.parts.uuid.as_bytes()];
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(&Hash::Sha256.digest(&parts));
        fingerprint
    }

    /// Returns the slots on which a passphrase is tried when the caller names no slot.
    pub(crate) fn tried(&self) -> impl Iterator<Item = &Slot> {
        let tried = |slot: &&Slot| slot.unusable.is_none() && slot.priority != Priority::Ignore;
        self.parts.slots.iter().filter(tried)
    }

    pub(crate) fn slot(&self, number: u32) -> Result<&Slot> {
        let mut slots = self.parts.slots.iter();
        slots
            .find(|slot| slot.number == number)
            .ok_or(Error::NoSuchSlot(number))
    }

    fn open(
        &self,
        slot: &Slot,
        bytes: &dyn Bytes,
        passphrase: &Passphrase,
    ) -> Result<Option<VolumeKey>> {
        let key = slot.open(bytes, passphrase, self.parts.payload.key_bytes)?;
        Ok(self.parts.digest.is_of(&key)?.then_some(key))
    }

    fn nothing_to_try(&self) -> Error {
        let unusable = |slot: &'_ Slot| Some(cannot_open(slot, slot.unusable.as_ref()?));
        let reason = self.parts.slots.iter().find_map(unusable);
        reason.unwrap_or_else(|| Error::unsupported("no key slot of this LUKS header is in use"))
    }
}

fn cannot_open(slot: &Slot, why: &str) -> Error {
    Error::unsupported(format!("key slot {} cannot be opened: {why}", slot.number))
}
