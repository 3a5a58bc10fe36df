//! Creates and changes version 1 headers.

use super::fields::{self, slot};
use super::read::Layout;
use crate::af;
use crate::bytes::put;
use crate::change::Change;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::parts::Parts;
use crate::random;
use crate::secret::{Passphrase, VolumeKey};
use crate::slot::{Area, Digest, Priority, SALT, SECTOR, Slot};

/// Offset of the payload of a new header in bytes: 2 MiB, as in cryptsetup.
pub const PAYLOAD_AT: u64 = 2 << 20;
/// Alignment of the key material of slots in bytes.
const ALIGNMENT: usize = 4096;

/// Returns the bytes before the payload of a new header with all slots free.
///
/// `key_bytes` is the size of the volume key from which the digest was computed.
pub fn empty(hash: Hash, digest: &Digest, iterations: u32, key_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; PAYLOAD_AT as usize];
    let sectors = |bytes: u64| (bytes as u32 / SECTOR).to_be_bytes();
    put(&mut bytes, 0, &fields::MAGIC);
    put(&mut bytes, fields::VERSION, &1u16.to_be_bytes());
    put(&mut bytes, fields::CIPHER, b"aes");
    put(&mut bytes, fields::MODE, b"xts-plain64");
    put(&mut bytes, fields::HASH, hash.name().as_bytes());
    put(&mut bytes, fields::PAYLOAD, &sectors(PAYLOAD_AT));
    put(
        &mut bytes,
        fields::KEY_BYTES,
        &(key_bytes as u32).to_be_bytes(),
    );
    put(&mut bytes, fields::DIGEST, &digest.value);
    put(&mut bytes, fields::DIGEST_SALT, &digest.salt);
    put(
        &mut bytes,
        fields::DIGEST_ITERATIONS,
        &iterations.to_be_bytes(),
    );
    put(&mut bytes, fields::UUID, random::uuid()?.as_bytes());
    let area = af::split_len(key_bytes).next_multiple_of(ALIGNMENT);
    for number in 0..fields::SLOT_COUNT {
        let at = slot(number);
        let material = (ALIGNMENT + number as usize * area) as u64;
        put(&mut bytes, at, &fields::INACTIVE.to_be_bytes());
        put(&mut bytes, at + fields::SLOT_MATERIAL, &sectors(material));
        put(
            &mut bytes,
            at + fields::SLOT_STRIPES,
            &(af::STRIPES as u32).to_be_bytes(),
        );
    }
    Ok(bytes)
}

/// Returns the number of a free slot and the changes that store `key` in the slot.
///
/// The changes write the key material, salt and iterations before they mark the slot as active. The
/// mark is one field within a sector, so the disk writes it atomically.
pub fn add(
    layout: &Layout,
    parts: &Parts,
    kdf: Kdf,
    passphrase: &Passphrase,
    key: &VolumeKey,
) -> Result<(u32, Vec<Change>)> {
    let number = (0..fields::SLOT_COUNT)
        .find(|&number| !layout.is_active(number))
        .ok_or(Error::NoFreeSlot)?;
    let Kdf::Pbkdf2 { iterations, .. } = kdf else {
        return Err(Error::unsupported(
            "LUKS1 has no other key derivation than PBKDF2",
        ));
    };
    let new = Slot {
        number,
        kdf,
        salt: random::array()?,
        af_hash: parts.hash,
        area: area(layout, parts, number),
        priority: Priority::Normal,
        unusable: None,
    };
    let mut secrets = iterations.to_be_bytes().to_vec();
    secrets.extend_from_slice(&new.salt);
    let changes = vec![
        Change::new(new.area.at, new.seal(passphrase, key)?),
        secrets_change(number, secrets),
        state_change(number, fields::ACTIVE),
    ];
    Ok((number, changes))
}

/// Returns the changes that free the slot `number`.
///
/// The changes mark the slot as inactive first, then wipe its key material, then clear its salt and
/// iterations.
pub fn remove(layout: &Layout, parts: &Parts, number: u32) -> Result<Vec<Change>> {
    let area = area(layout, parts, number);
    Ok(vec![
        state_change(number, fields::INACTIVE),
        Change::wipe(area.at, area.len)?,
        secrets_change(number, vec![0; size_of::<u32>() + SALT]),
    ])
}

fn area(layout: &Layout, parts: &Parts, number: u32) -> Area {
    Area {
        at: layout.material(number),
        len: af::split_len(parts.payload.key_bytes) as u64,
        key_bytes: parts.payload.key_bytes,
        iv: parts.payload.iv,
    }
}

fn state_change(number: u32, state: u32) -> Change {
    Change::new(slot(number) as u64, state.to_be_bytes())
}

fn secrets_change(number: u32, secrets: Vec<u8>) -> Change {
    Change::new((slot(number) + fields::SLOT_ITERATIONS) as u64, secrets)
}
