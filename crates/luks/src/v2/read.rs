//! Reads version 2 headers.

use super::binary::{self, Binary, COPY_LENS, Copy, Valid};
use super::json::{self, Metadata, number, shown};
use super::slots::{self, MAX_SLOTS};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::parts::{self, Parts};
use crate::payload::{Iv, Payload};
use crate::slot::Slot;
use serde_json::Value;

/// The data that is needed to change a header.
#[derive(Clone, Debug)]
pub struct Layout {
    pub binary: Binary,
    /// The complete JSON object.
    pub json: Value,
    /// Salts of the two copies; `None` for a copy that is invalid or outdated.
    pub salts: [Option<[u8; 64]>; 2],
    /// The copy to overwrite first, because the header remains readable without it.
    pub spare: Copy,
    /// Key in the JSON object `digests` of the digest that belongs to the segment.
    pub digest: String,
    /// Start and end of the space for key material.
    pub areas: (u64, u64),
}

/// Reads the header at the start of `bytes`.
///
/// Uses the newer one of the copies whose checksums are correct.
pub fn read(bytes: &dyn Bytes) -> Result<(Parts, Layout)> {
    let (copies, salts) = copies(bytes)?;
    let newest_sequence = copies.iter().map(|(_, valid)| valid.binary.sequence).max();
    let (valid, json, spare) = newest(copies)?;
    let metadata: Metadata = json::typed(&json, "its JSON")?;
    check_config(&metadata, &valid.binary)?;
    let segment = only_segment(&metadata)?;
    let digest = digest_of(&metadata, segment)?;
    let areas = areas(&metadata, &valid.binary)?;
    let key_bytes = key_bytes(&metadata, &digest.value)?;
    let payload = payload(&metadata, segment, areas, key_bytes, bytes.len()?)?;
    let slots = all_slots(&metadata, &digest.value, key_bytes, areas)?;
    let (hash, checked) = slots::digest(&digest.value)?;
    let parts = Parts {
        uuid: valid.binary.uuid(),
        payload,
        hash,
        slots,
        digest: checked,
    };
    let digest = digest.key.to_owned();
    let layout = Layout {
        binary: Binary {
            sequence: newest_sequence.unwrap_or_default(),
            ..valid.binary
        },
        json,
        salts,
        spare,
        digest,
        areas,
    };
    Ok((parts, layout))
}

type Copies = Vec<(Copy, Valid)>;

/// Returns the copies with correct checksums, the newest first, and their salts.
///
/// An outdated copy has no salt.
fn copies(bytes: &dyn Bytes) -> Result<(Copies, [Option<[u8; 64]>; 2])> {
    let first = binary::read(bytes, Copy::First, 0)?;
    let second = match &first {
        Some(first) => binary::read(bytes, Copy::Second, first.binary.copy_len as u64)?,
        None => {
            let mut found = None;
            for at in COPY_LENS {
                found = binary::read(bytes, Copy::Second, at as u64)?;
                if found.is_some() {
                    break;
                }
            }
            found
        }
    };
    let mut salts = [None, None];
    let mut copies = Vec::new();
    for (copy, valid) in [(Copy::First, first), (Copy::Second, second)] {
        if let Some(valid) = valid {
            salts[copy as usize] = Some(valid.salt);
            copies.push((copy, valid));
        }
    }
    if let [(_, first), (_, second)] = &copies[..]
        && first.binary.sequence != second.binary.sequence
    {
        let stale = usize::from(first.binary.sequence > second.binary.sequence);
        salts[stale] = None;
        copies.swap(0, 1 - stale);
    }
    Ok((copies, salts))
}

/// Returns the first copy with readable JSON, its JSON, and the copy to overwrite first.
///
/// `copies` must be ordered by age, the newest first.
fn newest(copies: Copies) -> Result<(Valid, Value, Copy)> {
    let mut readable = Vec::new();
    let mut failed = None;
    for (copy, valid) in copies {
        match json::parse(&valid.json) {
            Ok(json) => readable.push((copy, valid, json)),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let has_twin = match &readable[..] {
        [(_, one, _), (_, other, _)] => one.binary.sequence == other.binary.sequence,
        _ => false,
    };
    let Some((copy, valid, json)) = readable.into_iter().next() else {
        return Err(failed.unwrap_or(Error::NotLuks));
    };
    let spare = match copy {
        Copy::First if !has_twin => Copy::Second,
        Copy::First | Copy::Second => Copy::First,
    };
    Ok((valid, json, spare))
}

fn check_config(metadata: &Metadata, binary: &Binary) -> Result<()> {
    if let [first, ..] = &metadata.config.requirements.mandatory[..] {
        return Err(Error::unsupported(format!(
            "this LUKS header requires {}, which is not supported: finish that with cryptsetup",
            shown(first)
        )));
    }
    if metadata.config.json_size.0 != (binary.copy_len - binary::LEN) as u64 {
        return Err(Error::damaged(
            "its JSON area has another size than it says",
        ));
    }
    Ok(())
}

/// Returns the name of the only segment, which is the payload.
fn only_segment(metadata: &Metadata) -> Result<&str> {
    let mut names = metadata.segments.keys();
    match (names.next(), names.next()) {
        (Some(name), None) => Ok(name),
        (None, _) => Err(Error::damaged("it has no segment")),
        _ => Err(Error::unsupported(format!(
            "LUKS with {} segments is not supported, only with one",
            metadata.segments.len()
        ))),
    }
}

struct NamedDigest<'a> {
    key: &'a str,
    value: json::Digest,
}

/// Finds the digest of the key that encrypts `segment`.
fn digest_of<'a>(metadata: &'a Metadata, segment: &str) -> Result<NamedDigest<'a>> {
    for (key, value) in &metadata.digests {
        let value: json::Digest = json::typed(value, "a digest")?;
        if value.segments.iter().any(|name| name == segment) {
            return Ok(NamedDigest { key, value });
        }
    }
    Err(Error::damaged("its segment has no digest"))
}

/// Maximum size in bytes of the space for key material, as in cryptsetup.
const MAX_AREAS: u64 = 128 << 20;

fn areas(metadata: &Metadata, binary: &Binary) -> Result<(u64, u64)> {
    let (start, len) = (2 * binary.copy_len as u64, metadata.config.keyslots_size.0);
    if len > MAX_AREAS {
        return Err(Error::damaged(format!(
            "its area for key slots has {len} bytes, more than {MAX_AREAS}"
        )));
    }
    Ok((start, start + len))
}

/// Returns the size of the volume key in bytes, taken from the first slot that contains it.
fn key_bytes(metadata: &Metadata, digest: &json::Digest) -> Result<usize> {
    let slot = digest.keyslots.first();
    let slot = slot.and_then(|name| metadata.keyslots.get(name));
    // A header without key slots has been erased; the size does not matter then.
    let bytes = slot.map_or(Some(64), |slot| slot.get("key_size")?.as_u64());
    parts::key_bytes(bytes.ok_or_else(|| Error::damaged("a key slot has no key size"))?)
}

fn payload(
    metadata: &Metadata,
    name: &str,
    areas: (u64, u64),
    key_bytes: usize,
    len: u64,
) -> Result<Payload> {
    let value = &metadata.segments[name];
    match value.get("type").and_then(Value::as_str) {
        Some("crypt") => {}
        other => {
            return Err(Error::unsupported(format!(
                "LUKS with a segment of the type {} is not supported, only with crypt",
                shown(other.unwrap_or("(none)"))
            )));
        }
    }
    let segment: json::Segment = json::typed(value, "its segment")?;
    refuse_extras(&segment)?;
    let iv = slots::iv(&segment.encryption)?;
    let offset = segment.offset.0;
    check_offset(offset, areas, len)?;
    Ok(Payload {
        offset,
        size: segment_size(&segment)?,
        sector_size: segment.sector_size,
        iv: Iv {
            tweak: segment.iv_tweak.0,
            ..iv
        },
        key_bytes,
    })
}

fn refuse_extras(segment: &json::Segment) -> Result<()> {
    if segment.integrity.is_some() {
        return Err(Error::unsupported(
            "LUKS with integrity protection is not supported, only without",
        ));
    }
    if let [flag, ..] = &segment.flags[..] {
        return Err(Error::unsupported(format!(
            "LUKS with a segment of the flag {} is not supported",
            shown(flag)
        )));
    }
    if !matches!(segment.sector_size, 512 | 1024 | 2048 | 4096) {
        return Err(Error::unsupported(format!(
            "LUKS with sectors of {} bytes is not supported, only of 512, 1024, 2048 and 4096",
            segment.sector_size
        )));
    }
    Ok(())
}

fn check_offset(offset: u64, areas: (u64, u64), len: u64) -> Result<()> {
    match offset {
        0 => Err(Error::unsupported(
            "this LUKS header is for a payload in another file, which is not supported",
        )),
        _ if !offset.is_multiple_of(512) || offset < areas.1 => Err(Error::damaged(format!(
            "its payload starts at {offset}, which is among its key slots or no multiple of 512"
        ))),
        _ if offset > len => Err(Error::damaged(format!(
            "its payload starts at {offset}, but the file ends at {len}"
        ))),
        _ => Ok(()),
    }
}

fn segment_size(segment: &json::Segment) -> Result<Option<u64>> {
    if segment.size == "dynamic" {
        return Ok(None);
    }
    number(&segment.size)
        .filter(|&size| size > 0 && size.is_multiple_of(segment.sector_size.into()))
        .filter(|size| segment.offset.0.checked_add(*size).is_some())
        .map(Some)
        .ok_or_else(|| Error::damaged("its segment's size is not in whole sectors"))
}

/// Reads all slots. Marks slots with a key other than the payload's as unusable.
fn all_slots(
    metadata: &Metadata,
    digest: &json::Digest,
    key_bytes: usize,
    areas: (u64, u64),
) -> Result<Vec<Slot>> {
    let mut slots = Vec::new();
    let mut taken = Vec::new();
    for (name, value) in &metadata.keyslots {
        let number = number(name)
            .filter(|&number| number < MAX_SLOTS.into() && number.to_string() == *name)
            .ok_or_else(|| Error::damaged("a key slot has no number below 32"))?
            as u32;
        let mut slot = slots::slot(number, value, key_bytes)?;
        if !digest.keyslots.contains(name) && slot.unusable.is_none() {
            slot.unusable = Some("its key is not that of the payload".into());
        }
        let start = slot.area.at;
        let end = start
            .checked_add(slot.area.len)
            .filter(|&end| end <= areas.1);
        match end {
            Some(end) if start >= areas.0 && end > start => taken.push((number, start, end)),
            _ => {
                return Err(Error::damaged(format!(
                    "the key material of key slot {number} is not in the area for it"
                )));
            }
        }
        slots.push(slot);
    }
    parts::refuse_overlaps(&mut taken)?;
    slots.sort_by_key(|slot| slot.number);
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hash;

    fn copies(sequences: [u64; 2], readable: [bool; 2]) -> Copies {
        let copy = |n: usize, copy| {
            let json = if readable[n] { "{}\0" } else { "{\0" };
            let binary = Binary {
                copy_len: 16 << 10,
                sequence: sequences[n],
                label: [0; 48],
                subsystem: [0; 48],
                uuid: [0; 40],
                hash: Hash::Sha256,
            };
            let json = json.into();
            let salt = [0; 64];
            (copy, Valid { binary, salt, json })
        };
        let mut both = vec![copy(0, Copy::First), copy(1, Copy::Second)];
        both.sort_by_key(|(_, valid)| std::cmp::Reverse(valid.binary.sequence));
        both
    }

    #[test]
    fn only_readable_copy_is_not_overwritten_first() {
        for sequences in [[1, 1], [1, 2], [2, 1]] {
            let spare = |readable| newest(copies(sequences, readable)).map(|(.., spare)| spare);
            assert_eq!(spare([true, false]).unwrap(), Copy::Second, "{sequences:?}");
            assert_eq!(spare([false, true]).unwrap(), Copy::First, "{sequences:?}");
            assert!(spare([false, false]).is_err());
        }
        // If both copies are readable, the older one is overwritten first.
        let spare = |sequences| newest(copies(sequences, [true, true])).unwrap().2;
        assert_eq!(spare([1, 2]), Copy::First);
        assert_eq!(spare([2, 1]), Copy::Second);
        assert_eq!(spare([1, 1]), Copy::First);
    }
}
