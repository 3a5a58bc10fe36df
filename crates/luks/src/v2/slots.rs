//! Reads key slots and digests from JSON.

use super::json::{self, shown};
use crate::af;
use crate::error::{Error, Result};
use crate::hash::{Hash, NAMES};
use crate::kdf::{Kdf, MAX_DIGEST_TIME, MAX_TIME, Variant};
use crate::parts::{iv_of_mode, key_bytes};
use crate::payload::Iv;
use crate::slot::{Area, Digest, Priority, SALT, Slot};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Maximum number of key slots, as in cryptsetup; slot numbers are below it.
pub const MAX_SLOTS: u32 = 32;

/// Reads the slot `number` from `value`. The slot's key must have `key_len` bytes.
///
/// A slot that Fathom does not support becomes unusable. An error means that the header is damaged.
pub fn slot(number: u32, value: &Value, key_len: usize) -> Result<Slot> {
    let place = format!("key slot {number}");
    let any: json::AnyKeyslot = json::typed(value, &place)?;
    let (at, len) = (any.area.offset.0, any.area.size.0);
    usable(&any, value, key_len)
        .or_else(|error| match error {
            Error::Unsupported(why) | Error::Damaged(why) => Ok(Slot {
                number,
                kdf: Kdf::Pbkdf2 {
                    hash: Hash::Sha256,
                    iterations: 0,
                },
                salt: [0; SALT],
                af_hash: Hash::Sha256,
                area: Area {
                    at,
                    len,
                    key_bytes: key_len,
                    iv: Iv::default(),
                },
                priority: Priority::Ignore,
                unusable: Some(why),
            }),
            error => Err(error),
        })
        .map(|slot| Slot { number, ..slot })
}

fn usable(any: &json::AnyKeyslot, value: &Value, key_len: usize) -> Result<Slot> {
    if any.r#type != "luks2" || any.area.r#type != "raw" {
        return Err(Error::unsupported(format!(
            "it is of the type {} with an area of the type {}, and only luks2 with raw is \
             supported",
            shown(&any.r#type),
            shown(&any.area.r#type)
        )));
    }
    let keyslot: json::Keyslot = json::typed(value, "it")?;
    let af_hash = af(&keyslot.af)?;
    if keyslot.key_size != key_len as u64 {
        return Err(Error::unsupported(format!(
            "its key has {} bytes and that of others {key_len}",
            keyslot.key_size
        )));
    }
    let area = area(any, &keyslot, key_len)?;
    let kdf = kdf(&keyslot.kdf)?;
    Ok(Slot {
        number: 0,
        unusable: kdf.objection(area.key_bytes, MAX_TIME),
        kdf,
        salt: salt(&keyslot.kdf.salt)?,
        af_hash,
        area,
        priority: match keyslot.priority {
            Some(0) => Priority::Ignore,
            Some(2) => Priority::Prefer,
            _ => Priority::Normal,
        },
    })
}

fn af(af: &json::Af) -> Result<Hash> {
    if af.r#type != "luks1" || af.stripes != af::STRIPES as u64 {
        return Err(Error::unsupported(format!(
            "its key is split by {} into {} stripes, and only luks1 with {} is supported",
            shown(&af.r#type),
            af.stripes,
            af::STRIPES
        )));
    }
    hash(&af.hash)
}

fn area(any: &json::AnyKeyslot, keyslot: &json::Keyslot, key_len: usize) -> Result<Area> {
    let len = any.area.size.0;
    if len < af::split_len(key_len) as u64 {
        return Err(Error::damaged(format!(
            "its area of {len} bytes is too small for its key material"
        )));
    }
    Ok(Area {
        at: any.area.offset.0,
        len,
        key_bytes: key_bytes(keyslot.area.key_size)?,
        iv: iv(&keyslot.area.encryption)?,
    })
}

fn kdf(kdf: &json::Kdf) -> Result<Kdf> {
    let given = |field: Option<u32>, name| {
        field.ok_or_else(|| Error::damaged(format!("its key derivation lacks {name}")))
    };
    let variant = match kdf.r#type.as_str() {
        "pbkdf2" => {
            return Ok(Kdf::Pbkdf2 {
                hash: hash(kdf.hash.as_deref().unwrap_or_default())?,
                iterations: given(kdf.iterations, "iterations")?,
            });
        }
        "argon2i" => Variant::I,
        "argon2id" => Variant::Id,
        name => {
            return Err(Error::unsupported(format!(
                "its key derivation is {}, and only pbkdf2, argon2i and argon2id are supported",
                shown(name)
            )));
        }
    };
    Ok(Kdf::Argon2 {
        variant,
        passes: given(kdf.time, "time")?,
        memory_kib: given(kdf.memory, "memory")?,
        lanes: given(kdf.cpus, "cpus")?,
    })
}

/// Returns the IV scheme of `encryption`, which names a cipher and its mode.
pub fn iv(encryption: &str) -> Result<Iv> {
    let iv = encryption.strip_prefix("aes-").and_then(iv_of_mode);
    iv.ok_or_else(|| {
        Error::unsupported(format!(
            "LUKS with the cipher {} is not supported, only with aes-xts-plain64 and \
             aes-xts-plain",
            shown(encryption)
        ))
    })
}

fn hash(name: &str) -> Result<Hash> {
    Hash::named(name).ok_or_else(|| {
        Error::unsupported(format!(
            "LUKS with the hash {} is not supported, only with {NAMES}",
            shown(name)
        ))
    })
}

fn salt(text: &str) -> Result<[u8; SALT]> {
    let bytes = STANDARD.decode(text).ok();
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| Error::damaged("a salt is not 32 bytes in base64"))
}

/// Reads a digest and its hash from JSON.
pub fn digest(digest: &json::Digest) -> Result<(Hash, Digest)> {
    if digest.r#type != "pbkdf2" {
        return Err(Error::unsupported(format!(
            "LUKS with a digest of the type {} is not supported, only with pbkdf2",
            shown(&digest.r#type)
        )));
    }
    let hash = hash(digest.hash.as_deref().unwrap_or_default())?;
    let value = STANDARD.decode(digest.digest.as_deref().unwrap_or_default());
    let value = value
        .ok()
        .filter(|value| value.len() == 20 || value.len() == hash.len())
        .ok_or_else(|| Error::damaged("its digest has a wrong length or is no base64"))?;
    let kdf = Kdf::Pbkdf2 {
        hash,
        iterations: digest.iterations.unwrap_or(0),
    };
    if let Some(why) = kdf.objection(value.len(), MAX_DIGEST_TIME) {
        return Err(Error::unsupported(format!(
            "the digest of this LUKS header cannot be checked: {why}"
        )));
    }
    let salt = salt(digest.salt.as_deref().unwrap_or_default())?;
    Ok((hash, Digest { kdf, salt, value }))
}
