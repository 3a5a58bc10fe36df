//! What encryption headers say, in the words of `qemu-img info`, which knows version 1.

use fathom_luks::{Description, SlotDescription};
use serde_json::{Map, Value};
use std::fmt::{self, Formatter};

/// Each key is split into so many parts.
const STRIPES: u64 = 4000;

/// Something with a name, in the order in which people are shown it.
pub(super) struct Field(&'static str, Shown);

enum Shown {
    Plain(Value),
    /// By their numbers.
    List(Vec<(u32, Vec<Field>)>),
}

fn plain(name: &'static str, value: impl Into<Value>) -> Field {
    Field(name, Shown::Plain(value.into()))
}

/// In a qcow2 image it is one of several formats.
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

/// Of qcow2 images that have no header for it.
pub(super) fn as_of_old() -> Vec<Field> {
    vec![plain("format", "aes")]
}

fn slots(header: &Description) -> Vec<(u32, Vec<Field>)> {
    let mut slots = Vec::new();
    for slot in &header.slots {
        let mut fields = used_slot(slot);
        // (Of version 1 there are all of them.)
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
