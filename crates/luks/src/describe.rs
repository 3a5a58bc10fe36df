//! A header for people.

use crate::header::{Header, Layout};
use crate::kdf::Kdf;
use crate::parts::mode_of_iv;
use crate::slot::{Priority, Slot};
use crate::v1;
use serde::Serialize;

/// What is in a header, without anything secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Description {
    /// 1 or 2.
    pub version: u32,
    /// As it is in the header.
    pub uuid: String,
    /// As "aes-xts-plain64".
    pub cipher: String,
    /// Of the volume key: 256 for AES-128 in XTS mode, 512 for AES-256.
    pub key_bits: usize,
    /// Of the digest and, in version 1, of key derivation.
    pub hash: &'static str,
    /// Bytes from the header's start to the payload's.
    pub payload_offset: u64,
    /// Bytes of the payload; absent if it is all that follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_size: Option<u64>,
    /// In bytes.
    pub sector_size: u32,
    /// Those in use, by number.
    pub slots: Vec<SlotDescription>,
    /// Those of version 1 that are not.
    pub free: Vec<FreeSlot>,
    /// Of the digest by which the volume key is known.
    pub digest_iterations: u32,
}

/// A key slot of version 1 that nothing is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FreeSlot {
    /// From 0.
    pub number: u32,
    /// Where its key material will be, in bytes from the header's start.
    pub material_offset: u64,
}

/// A key slot in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotDescription {
    /// From 0.
    pub number: u32,
    /// Whether a passphrase is tried on it without naming it.
    pub active: bool,
    /// Why it cannot be opened here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    /// "pbkdf2", "argon2i" or "argon2id"; absent where it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kdf: Option<&'static str>,
    /// Of PBKDF2, or Argon2's passes.
    pub iterations: u32,
    /// Of Argon2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_kib: Option<u32>,
    /// Of Argon2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Where its key material is, in bytes from the header's start.
    pub material_offset: u64,
}

impl Header {
    /// What is in it.
    pub fn describe(&self) -> Description {
        let payload = self.payload();
        Description {
            version: self.version(),
            uuid: self.uuid().to_owned(),
            cipher: format!("aes-{}", mode_of_iv(payload.iv)),
            key_bits: payload.key_bytes * 8,
            hash: self.parts.hash.name(),
            payload_offset: payload.offset,
            payload_size: payload.size,
            sector_size: payload.sector_size,
            slots: self.parts.slots.iter().map(describe).collect(),
            free: self.free_slots(),
            digest_iterations: match self.parts.digest.kdf {
                Kdf::Pbkdf2 { iterations, .. } => iterations,
                Kdf::Argon2 { passes, .. } => passes,
            },
        }
    }
}

impl Header {
    fn free_slots(&self) -> Vec<FreeSlot> {
        let Layout::V1(layout) = &self.layout else {
            return Vec::new();
        };
        let free = (0..v1::fields::SLOT_COUNT).filter(|number| !layout.is_active(*number));
        let slot = |number| FreeSlot {
            number,
            material_offset: layout.material(number),
        };
        free.map(slot).collect()
    }
}

fn describe(slot: &Slot) -> SlotDescription {
    let (iterations, memory_kib, threads) = match slot.kdf {
        Kdf::Pbkdf2 { iterations, .. } => (iterations, None, None),
        Kdf::Argon2 {
            passes,
            memory_kib,
            lanes,
            ..
        } => (passes, Some(memory_kib), Some(lanes)),
    };
    SlotDescription {
        number: slot.number,
        active: slot.unusable.is_none() && slot.priority != Priority::Ignore,
        // Of a slot that was not understood there are no iterations.
        kdf: (iterations > 0).then(|| slot.kdf.name()),
        unusable: slot.unusable.clone(),
        iterations,
        memory_kib,
        threads,
        material_offset: slot.area.at,
    }
}
