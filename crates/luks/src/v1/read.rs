//! Reads version 1 headers.

use super::fields::{self, slot};
use crate::af;
use crate::bytes::{Bytes, array_at, text, u32_at};
use crate::error::{Error, Result};
use crate::hash::{Hash, NAMES};
use crate::kdf::{Kdf, MAX_DIGEST_TIME, MAX_TIME};
use crate::parts::{self, Parts, iv_of_mode};
use crate::payload::{Iv, Payload};
use crate::slot::{Area, Digest, Priority, SECTOR, Slot};

/// The fields of a header as stored on disk, after validation.
#[derive(Clone, Debug)]
pub struct Layout {
    pub fields: [u8; fields::LEN],
}

impl Layout {
    pub fn is_active(&self, number: u32) -> bool {
        u32_at(&self.fields, slot(number)) == fields::ACTIVE
    }

    /// Returns the offset in bytes of a slot's key material, whether the slot is in use or not.
    pub fn material(&self, number: u32) -> u64 {
        let sectors = u32_at(&self.fields, slot(number) + fields::SLOT_MATERIAL);
        u64::from(sectors) * u64::from(SECTOR)
    }
}

/// Reads the header at the start of `bytes`.
///
/// The caller must have checked the magic number and the version.
pub fn read(bytes: &dyn Bytes) -> Result<(Parts, Layout)> {
    let mut fields = [0; fields::LEN];
    bytes.read_at(&mut fields, 0)?;
    let layout = Layout { fields };
    let hash = hash(&fields)?;
    let iv = iv(&fields)?;
    let key_bytes = parts::key_bytes(u32_at(&fields, fields::KEY_BYTES).into())?;
    let payload = payload(&fields, iv, key_bytes, bytes.len()?)?;
    check_slots(&layout, &payload)?;
    let slots = (0..fields::SLOT_COUNT)
        .filter(|&number| layout.is_active(number))
        .map(|number| read_slot(&layout, number, hash, &payload))
        .collect();
    let parts = Parts {
        uuid: text(&fields[fields::UUID..][..fields::UUID_LEN]),
        payload,
        hash,
        slots,
        digest: digest(&fields, hash)?,
    };
    Ok((parts, layout))
}

fn hash(fields: &[u8]) -> Result<Hash> {
    let name = text(&fields[fields::HASH..][..fields::NAME]);
    Hash::named(&name.to_ascii_lowercase()).ok_or_else(|| {
        Error::unsupported(format!(
            "LUKS with the hash {name} is not supported, only with {NAMES}"
        ))
    })
}

fn iv(fields: &[u8]) -> Result<Iv> {
    let cipher = text(&fields[fields::CIPHER..][..fields::NAME]);
    let mode = text(&fields[fields::MODE..][..fields::NAME]);
    iv_of_mode(&mode)
        .filter(|_| cipher == "aes")
        .ok_or_else(|| {
            Error::unsupported(format!(
                "LUKS with the cipher {cipher}-{mode} is not supported, only with \
                 aes-xts-plain64 and aes-xts-plain"
            ))
        })
}

fn payload(fields: &[u8], iv: Iv, key_bytes: usize, len: u64) -> Result<Payload> {
    let offset = u64::from(u32_at(fields, fields::PAYLOAD)) * u64::from(SECTOR);
    if offset == 0 {
        return Err(Error::unsupported(
            "this LUKS header is for a payload in another file, which is not supported",
        ));
    }
    if offset > len {
        return Err(Error::damaged(format!(
            "its payload starts at {offset}, but the file ends at {len}"
        )));
    }
    Ok(Payload {
        offset,
        size: None,
        sector_size: SECTOR,
        iv,
        key_bytes,
    })
}

/// Checks all slots, including those not in use.
fn check_slots(layout: &Layout, payload: &Payload) -> Result<()> {
    let len = af::split_len(payload.key_bytes) as u64;
    let mut areas = Vec::with_capacity(fields::SLOT_COUNT as usize);
    for number in 0..fields::SLOT_COUNT {
        let state = u32_at(&layout.fields, slot(number));
        if state != fields::ACTIVE && state != fields::INACTIVE {
            return Err(Error::damaged(format!(
                "key slot {number} is neither in use nor free"
            )));
        }
        let stripes = u32_at(&layout.fields, slot(number) + fields::SLOT_STRIPES);
        if stripes as usize != af::STRIPES {
            return Err(Error::damaged(format!(
                "key slot {number} has {stripes} stripes instead of {}",
                af::STRIPES
            )));
        }
        let start = layout.material(number);
        if start < fields::RESERVED || start + len > payload.offset {
            return Err(Error::damaged(format!(
                "the key material of key slot {number} is not between header and payload"
            )));
        }
        areas.push((number, start, start + len));
    }
    parts::refuse_overlaps(&mut areas)
}

fn read_slot(layout: &Layout, number: u32, hash: Hash, payload: &Payload) -> Slot {
    let fields = &layout.fields[slot(number)..][..fields::SLOT_LEN];
    let kdf = Kdf::Pbkdf2 {
        hash,
        iterations: u32_at(fields, fields::SLOT_ITERATIONS),
    };
    Slot {
        number,
        unusable: kdf.objection(payload.key_bytes, MAX_TIME),
        kdf,
        salt: array_at(fields, fields::SLOT_SALT),
        af_hash: hash,
        area: Area {
            at: layout.material(number),
            len: af::split_len(payload.key_bytes) as u64,
            key_bytes: payload.key_bytes,
            iv: payload.iv,
        },
        priority: Priority::Normal,
    }
}

fn digest(fields: &[u8], hash: Hash) -> Result<Digest> {
    let kdf = Kdf::Pbkdf2 {
        hash,
        iterations: u32_at(fields, fields::DIGEST_ITERATIONS),
    };
    if let Some(why) = kdf.objection(fields::DIGEST_LEN, MAX_DIGEST_TIME) {
        return Err(Error::unsupported(format!(
            "the digest of this LUKS header cannot be checked: {why}"
        )));
    }
    Ok(Digest {
        kdf,
        salt: array_at(fields, fields::DIGEST_SALT),
        value: fields[fields::DIGEST..][..fields::DIGEST_LEN].to_vec(),
    })
}
