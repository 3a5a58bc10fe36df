//! Creates and changes version 2 headers.

use super::binary::{self, Binary, Copy};
use super::read::Layout;
use super::slots::MAX_SLOTS;
use crate::af;
use crate::bytes::put;
use crate::change::Change;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::parts::{Parts, mode_of_iv};
use crate::payload::Iv;
use crate::random;
use crate::secret::{Passphrase, VolumeKey};
use crate::slot::{Area, Digest, Priority, Slot};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// Offset of the payload of a new header in bytes: 16 MiB, as in cryptsetup.
pub const PAYLOAD_AT: u64 = 16 << 20;
/// Size in bytes of a binary header with its JSON area, in a new header.
const COPY_LEN: usize = 16 << 10;
/// Alignment of key material areas in bytes.
const ALIGNMENT: u64 = 4096;
const FULL: &str = "the metadata of this LUKS header are full: remove a key or a token first";

/// Returns the bytes before the payload of a new header without key slots.
pub fn empty(hash: Hash, digest: &Digest, iterations: u32, sector_size: u32) -> Result<Vec<u8>> {
    let mut uuid = [0; 40];
    put(&mut uuid, 0, random::uuid()?.as_bytes());
    let binary = Binary {
        copy_len: COPY_LEN,
        sequence: 1,
        label: [0; 48],
        subsystem: [0; 48],
        uuid,
        hash: Hash::Sha256,
    };
    let json = json!({
        "keyslots": {},
        "tokens": {},
        "segments": { "0": {
            "type": "crypt",
            "offset": PAYLOAD_AT.to_string(),
            "size": "dynamic",
            "iv_tweak": "0",
            "encryption": "aes-xts-plain64",
            "sector_size": sector_size,
        } },
        "digests": { "0": {
            "type": "pbkdf2",
            "keyslots": [],
            "segments": ["0"],
            "hash": hash.name(),
            "iterations": iterations,
            "salt": STANDARD.encode(digest.salt),
            "digest": STANDARD.encode(&digest.value),
        } },
        "config": {
            "json_size": (COPY_LEN - binary::LEN).to_string(),
            "keyslots_size": (PAYLOAD_AT - 2 * COPY_LEN as u64).to_string(),
        },
    });
    let text = json.to_string();
    let mut bytes = vec![0; PAYLOAD_AT as usize];
    for copy in [Copy::First, Copy::Second] {
        let encoded = binary.encode(copy, &random::array()?, text.as_bytes());
        put(&mut bytes, binary.offset(copy) as usize, &encoded);
    }
    Ok(bytes)
}

/// Returns the number of a free slot and the changes that store `key` in the slot.
///
/// The changes write the key material first, then both copies of the header. At least one copy is
/// valid at any time.
pub fn add(
    layout: &Layout,
    parts: &Parts,
    kdf: Kdf,
    passphrase: &Passphrase,
    key: &VolumeKey,
) -> Result<(u32, Vec<Change>)> {
    let used = |number: &u32| parts.slots.iter().any(|slot| slot.number == *number);
    let number = (0..MAX_SLOTS).find(|number| !used(number));
    let number = number.ok_or(Error::NoFreeSlot)?;
    let new = Slot {
        number,
        kdf,
        salt: random::array()?,
        af_hash: parts.hash,
        area: free_area(layout, parts)?,
        priority: Priority::Normal,
        unusable: None,
    };
    let mut json = layout.json.clone();
    json["keyslots"][number.to_string()] = describe(&new, key);
    if let Value::Array(keyslots) = &mut json["digests"][&layout.digest]["keyslots"] {
        keyslots.push(number.to_string().into());
    }
    let mut changes = vec![Change::new(new.area.at, new.seal(passphrase, key)?)];
    changes.extend(write(layout, &json)?);
    Ok((number, changes))
}

/// Returns the changes that remove the slot `number`.
///
/// The changes write both copies of the header without the slot, then wipe its key material.
pub fn remove(layout: &Layout, parts: &Parts, number: u32) -> Result<Vec<Change>> {
    let mut json = layout.json.clone();
    let name = number.to_string();
    if let Value::Object(keyslots) = &mut json["keyslots"] {
        keyslots.remove(&name);
    }
    for section in ["digests", "tokens"] {
        forget(&mut json[section], &name);
    }
    let mut changes = write(layout, &json)?;
    for slot in parts.slots.iter().filter(|slot| slot.number == number) {
        changes.push(Change::wipe(slot.area.at, slot.area.len)?);
    }
    Ok(changes)
}

/// Removes references to the key slot `name` from all objects of a section.
fn forget(section: &mut Value, name: &str) {
    let Value::Object(objects) = section else {
        return;
    };
    for object in objects.values_mut() {
        if let Some(Value::Array(keyslots)) = object.get_mut("keyslots") {
            keyslots.retain(|keyslot| keyslot != name);
        }
    }
}

/// Returns the changes that write `json` to both copies of the header, the spare copy first.
fn write(layout: &Layout, json: &Value) -> Result<Vec<Change>> {
    let text = json.to_string();
    let sequence = layout.binary.sequence.checked_add(1);
    let binary = Binary {
        sequence: sequence.ok_or_else(|| Error::damaged("its sequence number has no next one"))?,
        ..layout.binary.clone()
    };
    if !binary.fits(text.as_bytes()) {
        return Err(Error::unsupported(FULL));
    }
    let order = match layout.spare {
        Copy::First => [Copy::First, Copy::Second],
        Copy::Second => [Copy::Second, Copy::First],
    };
    let encode = |copy| {
        let salt = match layout.salts[copy as usize] {
            Some(salt) => salt,
            None => random::array()?,
        };
        let bytes = binary.encode(copy, &salt, text.as_bytes());
        Ok(Change::new(binary.offset(copy), bytes))
    };
    order.into_iter().map(encode).collect()
}

/// Encodes a slot as JSON with exactly the fields that cryptsetup writes.
fn describe(slot: &Slot, key: &VolumeKey) -> Value {
    let salt = STANDARD.encode(slot.salt);
    let kdf = match &slot.kdf {
        Kdf::Pbkdf2 { hash, iterations } => json!({
            "type": slot.kdf.name(),
            "hash": hash.name(),
            "iterations": iterations,
            "salt": salt,
        }),
        Kdf::Argon2 {
            passes,
            memory_kib,
            lanes,
            ..
        } => json!({
            "type": slot.kdf.name(),
            "time": passes,
            "memory": memory_kib,
            "cpus": lanes,
            "salt": salt,
        }),
    };
    json!({
        "type": "luks2",
        "key_size": key.bytes().len(),
        "af": { "type": "luks1", "stripes": af::STRIPES, "hash": slot.af_hash.name() },
        "area": {
            "type": "raw",
            "offset": slot.area.at.to_string(),
            "size": slot.area.len.to_string(),
            "encryption": format!("aes-{}", mode_of_iv(slot.area.iv)),
            "key_size": slot.area.key_bytes,
        },
        "kdf": kdf,
    })
}

/// Finds free space for the key material of a new slot.
fn free_area(layout: &Layout, parts: &Parts) -> Result<Area> {
    let key_bytes = parts.payload.key_bytes;
    let len = (af::split_len(key_bytes) as u64).next_multiple_of(ALIGNMENT);
    let fits = |&(start, end): &(u64, u64)| end - start >= len;
    let (at, _) = gaps(layout, parts)
        .into_iter()
        .find(fits)
        .ok_or(Error::NoFreeSlot)?;
    Ok(Area {
        at,
        len,
        key_bytes,
        iv: Iv::default(),
    })
}

/// Returns the gaps between key material areas: starts and ends, the starts aligned.
fn gaps(layout: &Layout, parts: &Parts) -> Vec<(u64, u64)> {
    let (first, last) = layout.areas;
    let areas = parts.slots.iter().map(|slot| &slot.area);
    let mut taken: Vec<_> = areas.map(|area| (area.at, area.at + area.len)).collect();
    taken.push((last, last));
    taken.sort_unstable();
    let mut gaps = Vec::new();
    let mut start = first;
    for (from, to) in taken {
        if start < from {
            gaps.push((start, from));
        }
        start = to.next_multiple_of(ALIGNMENT);
    }
    gaps
}
