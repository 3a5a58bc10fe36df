//! Encryption headers in the terms of `qemu-img info`, which supports LUKS version 1.

use fathom_luks::{Description, SlotDescription};
use serde_json::{Map, Value};
use std::fmt::{self, Formatter};

/// Number of stripes into which the anti-forensic splitter divides each key.
const STRIPES: u64 = 4000;

/// A named value. Fields are shown in the order of their list.
pub(super) struct Field(&'static str, Shown);

enum Shown {
    Plain(Value),
    /// Numbered items.
    List(Vec<(u32, Vec<Field>)>),
}

fn plain(name: &'static str, value: impl Into<Value>) -> Field {
    Field(name, Shown::Plain(value.into()))
}

/// Returns the fields of an encryption header. In a qcow2 image, they include the encryption
/// format.
pub(super) fn fields(header: &Description, in_qcow2: bool) -> Vec<Field> {
    let mode = header.cipher.split('-').collect::<Vec<_>>();
    let [cipher, mode, iv] = mode[..] else {
        return Vec::new();
    };
    let mut fields = vec![
        plain("ivgen-alg", iv),
        plain("detached-header", false),
        plain("hash-alg", header.hash),
        plain("cipher-alg", format!("{cipher}-{}", header.key_bits / 2)),
        plain("uuid", header.uuid.as_str()),
    ];
    fields.extend(in_qcow2.then(|| plain("format", "luks")));
    fields.push(plain("cipher-mode", mode));
    if header.version != 1 {
        fields.push(plain("version", header.version));
        fields.push(plain("sector-size", header.sector_size));
    }
    fields.push(Field("slots", Shown::List(slots(header))));
    fields.push(plain("payload-offset", header.payload_offset));
    fields.push(plain("master-key-iters", header.digest_iterations));
    fields
}

/// Returns the fields of a qcow2 image with the obsolete AES encryption, which has no encryption
/// header.
pub(super) fn as_of_old() -> Vec<Field> {
    vec![plain("format", "aes")]
}

fn slots(header: &Description) -> Vec<(u32, Vec<Field>)> {
    let mut slots = Vec::new();
    for slot in &header.slots {
        let mut fields = used_slot(slot);
        // In version 1, the list includes all slots, so the position is the number.
        if header.version != 1 {
            fields.insert(0, plain("number", slot.number));
        }
        slots.push((slot.number, fields));
    }
    slots.extend(header.free.iter().map(|slot| {
        let fields = vec![
            plain("active", false),
            plain("key-offset", slot.material_offset),
        ];
        (slot.number, fields)
    }));
    slots.sort_by_key(|(number, _)| *number);
    slots
}

fn used_slot(slot: &SlotDescription) -> Vec<Field> {
    let mut fields = vec![
        plain("active", slot.active),
        plain("iters", slot.iterations),
        plain("key-offset", slot.material_offset),
        plain("stripes", STRIPES),
    ];
    if let (Some(kdf), Some(memory)) = (slot.kdf, slot.memory_kib) {
        fields.extend([plain("kdf", kdf), plain("memory-kib", memory)]);
    }
    fields.extend(slot.unusable.as_deref().map(|why| plain("unusable", why)));
    fields
}

pub(super) fn to_json(fields: &[Field]) -> Map<String, Value> {
    let value = |shown: &Shown| match shown {
        Shown::Plain(value) => value.clone(),
        Shown::List(items) => items.iter().map(|(_, item)| to_json(item)).collect(),
    };
    let named = fields
        .iter()
        .map(|Field(name, shown)| ((*name).to_owned(), value(shown)));
    named.collect()
}

pub(super) fn fmt(f: &mut Formatter<'_>, fields: &[Field], indent: usize) -> fmt::Result {
    for Field(name, shown) in fields {
        let name = name.replace('-', " ");
        match shown {
            Shown::Plain(Value::String(text)) => {
                writeln!(f, "{:indent$}{name}: {}", "", crate::shown(text))?
            }
            Shown::Plain(value) => writeln!(f, "{:indent$}{name}: {value}", "")?,
            Shown::List(items) => {
                writeln!(f, "{:indent$}{name}:", "")?;
                for (number, item) in items {
                    writeln!(f, "{:1$}[{number}]:", "", indent + 4)?;
                    fmt(f, item, indent + 8)?;
                }
            }
        }
    }
    Ok(())
}
