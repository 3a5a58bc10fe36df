//! Describes a header for people.

use crate::header::{Header, Layout};
use crate::kdf::Kdf;
use crate::parts::mode_of_iv;
use crate::slot::{Priority, Slot};
use crate::v1;
use serde::Serialize;

/// The contents of a header, without secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Description {
    /// LUKS version: 1 or 2.
    pub version: u32,
    /// UUID as stored in the header.
    pub uuid: String,
    /// Cipher with mode and IV, for example "aes-xts-plain64".
    pub cipher: String,
    /// Size of the volume key in bits: 256 for AES-128 in XTS mode, 512 for AES-256.
    pub key_bits: usize,
    /// Hash of the volume key digest and, in version 1, of the key derivation.
    pub hash: &'static str,
    /// Offset of the payload in bytes from the start of the header.
    pub payload_offset: u64,
    /// Size of the payload in bytes; absent if the payload extends to the end of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_size: Option<u64>,
    /// Sector size in bytes.
    pub sector_size: u32,
    /// Key slots in use, ordered by number.
    pub slots: Vec<SlotDescription>,
    /// Free key slots of version 1; always empty for version 2.
    pub free: Vec<FreeSlot>,
    /// Number of PBKDF2 iterations of the digest that identifies the volume key.
    pub digest_iterations: u32,
}

/// A free key slot of version 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FreeSlot {
    /// Slot number, from 0.
    pub number: u32,
    /// Offset of the space for the key material, in bytes from the start of the header.
    pub material_offset: u64,
}

/// A key slot in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotDescription {
    /// Slot number, from 0.
    pub number: u32,
    /// Whether a passphrase is tried on this slot when the caller names no slot.
    pub active: bool,
    /// The reason why Fathom cannot open this slot, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    /// Key derivation: "pbkdf2", "argon2i" or "argon2id"; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kdf: Option<&'static str>,
    /// Number of PBKDF2 iterations or Argon2 passes.
    pub iterations: u32,
    /// Memory of Argon2 in KiB; absent for PBKDF2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_kib: Option<u32>,
    /// Number of Argon2 threads; absent for PBKDF2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Offset of the key material, in bytes from the start of the header.
    pub material_offset: u64,
}

impl Header {
    /// Describes the header without its secrets.
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
        // The iteration count is 0 if the slot's key derivation was not understood.
        kdf: (iterations > 0).then(|| slot.kdf.name()),
        unusable: slot.unusable.clone(),
        iterations,
        memory_kib,
        threads,
        material_offset: slot.area.at,
    }
}
