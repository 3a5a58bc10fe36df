//! A LUKS header of either version.

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

/// A header that was read and checked. It is what was there at that time:
/// after changes it is to be read again.
#[derive(Clone, Debug)]
pub struct Header {
    pub(crate) parts: Parts,
    pub(crate) layout: Layout,
}

/// What only one version has.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    V1(Box<v1::Layout>),
    V2(Box<v2::Layout>),
}

impl Header {
    /// Bytes that [`Header::is_luks`] needs.
    pub const START: usize = 8;

    /// Whether a file that starts with `start` has a LUKS header there, of
    /// whichever version.
    pub fn is_luks(start: &[u8]) -> bool {
        start.starts_with(&v1::fields::MAGIC)
    }

    /// Reads the header at the start of `bytes` and checks every field.
    /// Needs at most about 100 MiB of memory, whatever is there.
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
            // Its second copy may be there where the first one is overwritten.
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

    /// 1 or 2.
    pub fn version(&self) -> u32 {
        match self.layout {
            Layout::V1(_) => 1,
            Layout::V2(_) => 2,
        }
    }

    /// Where the encrypted data is.
    pub fn payload(&self) -> Payload {
        self.parts.payload
    }

    /// As it is in the header.
    pub fn uuid(&self) -> &str {
        &self.parts.uuid
    }

    /// The volume key, by a passphrase of any slot; see [`Header::find`].
    pub fn unlock(&self, bytes: &dyn Bytes, passphrase: &Passphrase) -> Result<VolumeKey> {
        Ok(self.find(bytes, passphrase)?.0)
    }

    /// The volume key and the number of the slot that `passphrase` opens.
    ///
    /// Tries the slots in use by priority and number, but not those with the
    /// priority "ignore". Blocks for the time of their key derivations, and
    /// for no more than about a minute: what would take longer is
    /// [`Error::TooSlow`]. [`Error::WrongKey`] is for callers with further
    /// keys to try.
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

    /// The volume key, by the passphrase of slot `number` alone.
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

    /// Whether `key` is the volume key of this header. Takes the time of the
    /// digest's iterations: about 0.1 s.
    pub fn check(&self, key: &VolumeKey) -> bool {
        key.bytes().len() == self.parts.payload.key_bytes
            && self.parts.digest.is_of(key).unwrap_or(false)
    }

    /// By which a caller can tell that a volume key from an earlier unlock
    /// still belongs to a header: that of the header's digest, its salt and
    /// the UUID. Adding and removing keys does not change it.
    pub fn fingerprint(&self) -> [u8; 32] {
        let digest = &self.parts.digest;
        let parts = [&digest.salt, &digest.value[..], self.parts.uuid.as_bytes()];
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(&Hash::Sha256.digest(&parts));
        fingerprint
    }

    /// The slots that a passphrase without a slot's number is tried on.
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
