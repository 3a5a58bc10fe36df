//! `fathom img amend`: changes the keys that unlock an encrypted image.
//!
//! The data does not change: it is encrypted by the volume key, of which each key slot holds a
//! copy. After a power cut, the image has the old keys or the new keys.

use super::Image;
use crate::luks::{Part, refused};
use crate::served::Keys;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use fathom_luks::{Change, Effort, Header, Passphrase, SlotDescription};

/// Selects the key slots to erase.
#[derive(Debug)]
pub enum Slot {
    /// All slots that this passphrase unlocks.
    Of(Passphrase),
    /// The slot with this number.
    Number(u32),
}

/// The key slots of an encrypted image, for changes.
pub struct KeySlots<'a> {
    part: Part<'a>,
}

impl<'a> KeySlots<'a> {
    /// Opens the key slots of the image in `file`, which must not be in use.
    pub fn of(file: &'a dyn ImageFile, format: Format) -> Result<KeySlots<'a>> {
        let part = match Image::read(file, format)? {
            Image::Luks(image) => Part::all_of(file, image.header.payload().offset),
            Image::Qcow2(header) => match header.encryption()? {
                Some(crypto) => Part::within(file, crypto),
                None => return Err(Error::usage("not encrypted, so it has no keys")),
            },
            Image::Raw(_) | Image::Qed(_) | Image::Foreign(_) => {
                let problem = "has no keys, which only luks and encrypted qcow2 images have";
                return Err(Error::usage(format!("a {format} image, which {problem}")));
            }
        };
        Ok(KeySlots { part })
    }

    /// Adds the passphrase `new` in a free slot. `by` is a key that unlocks the image. Takes
    /// seconds. Returns the slot's number.
    pub fn add(&self, by: &Keys, new: &Passphrase, effort: &Effort) -> Result<u32> {
        let header = self.header()?;
        let key = by.derive(&header, &self.part).map_err(refused)?;
        let added = header.add_key(&key, new, effort).map_err(refused)?;
        self.write(&added.changes)?;
        Ok(added.slot)
    }

    /// Erases the selected slots, but never the last key. Returns the slots' numbers.
    pub fn remove(&self, slot: &Slot) -> Result<Vec<u32>> {
        let header = self.header()?;
        let numbers = match slot {
            Slot::Number(number) => vec![*number],
            Slot::Of(passphrase) => self.opened_by(&header, passphrase)?,
        };
        for number in &numbers {
            let changes = self.header()?.remove_key(*number);
            self.write(&changes.map_err(refused)?)?;
        }
        Ok(numbers)
    }

    /// Returns the numbers of all slots that `passphrase` unlocks. Fails before anything is erased
    /// if no other active slot would be left.
    fn opened_by(&self, header: &Header, passphrase: &Passphrase) -> Result<Vec<u32>> {
        let mut numbers = Vec::new();
        let slots = header.describe().slots;
        for slot in slots.iter().filter(|slot| slot.unusable.is_none()) {
            match header.unlock_slot(&self.part, passphrase, slot.number) {
                Ok(_) => numbers.push(slot.number),
                Err(fathom_luks::Error::WrongKey) => {}
                Err(error) => return Err(refused(error)),
            }
        }
        let stays = |slot: &SlotDescription| slot.active && !numbers.contains(&slot.number);
        match numbers.first() {
            None => Err(refused(fathom_luks::Error::WrongKey)),
            Some(last) if !slots.iter().any(stays) => {
                Err(refused(fathom_luks::Error::LastKey(*last)))
            }
            Some(_) => Ok(numbers),
        }
    }

    fn header(&self) -> Result<Header> {
        self.part.header().map_err(refused)
    }

    fn write(&self, changes: &[Change]) -> Result<()> {
        for Change { at, bytes } in changes {
            let end = at.saturating_add(bytes.len() as u64);
            if end > self.part.len {
                return Err(Error::invalid(
                    "its key slots are beyond the end of the encryption header",
                ));
            }
            let written = self.part.file.write_at(bytes, self.part.start + at);
            written.map_err(Error::io("cannot write its encryption header"))?;
            let synced = self.part.file.sync();
            synced.map_err(Error::io("cannot flush its encryption header"))?;
        }
        Ok(())
    }
}
