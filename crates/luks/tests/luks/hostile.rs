//! Malicious headers.

use crate::support::{NO_EFFORT, passphrase};
use fathom_luks::{Header, Options, create};
use proptest::prelude::*;
use std::sync::LazyLock;

/// Valid headers of both versions.
static HEADERS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    [1, 2].map(|version| {
        let options = Options {
            version,
            effort: NO_EFFORT,
            ..Options::default()
        };
        let made = create(&options, &passphrase("key")).expect("a header");
        made.bytes
    })
});

/// Reads a header and calls all methods that derive no key. Errors are allowed, panics are not.
fn read(bytes: &[u8]) {
    if let Ok(header) = Header::read(&bytes) {
        let description = header.describe();
        assert!(description.slots.len() <= 32);
        let _ = (header.payload(), header.fingerprint());
    }
}

/// Generates offsets in the first 600 bytes of a header, and the bytes to write there.
fn mutation() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let numbers = prop_oneof![
        Just(vec![0; 4]),
        Just(vec![0xff; 4]),
        Just(vec![0, 0, 0x10, 0]),
        prop::collection::vec(any::<u8>(), 1..9),
    ];
    (0usize..600, numbers)
}

/// Replaces the JSON of the version 2 header and corrects the checksum that covers it.
fn with_json(json: &str) -> Vec<u8> {
    use sha2::{Digest, Sha256};
    let mut bytes = HEADERS[1].clone();
    bytes[16384..32768].fill(0);
    bytes[4096..16384].fill(0);
    let len = json.len().min(12287);
    bytes[4096..4096 + len].copy_from_slice(&json.as_bytes()[..len]);
    bytes[448..512].fill(0);
    let checksum = Sha256::digest(&bytes[..16384]);
    bytes[448..480].copy_from_slice(&checksum);
    bytes
}

fn good_json() -> String {
    let area = &HEADERS[1][4096..16384];
    let end = area.iter().position(|&byte| byte == 0).unwrap();
    String::from_utf8(area[..end].to_vec()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn version_1_may_say_anything(changes in prop::collection::vec(mutation(), 1..5)) {
        let mut bytes = HEADERS[0].clone();
        for (at, part) in changes {
            bytes[at..at + part.len()].copy_from_slice(&part);
        }
        read(&bytes);
    }

    #[test]
    fn version_2_may_say_anything(changes in prop::collection::vec(mutation(), 1..5)) {
        let mut bytes = HEADERS[1].clone();
        for (at, part) in changes {
            bytes[at..at + part.len()].copy_from_slice(&part);
        }
        read(&bytes);
    }

    #[test]
    fn json_may_say_anything(at in 0usize..1000, part in "[0-9a-z\",:{}\\[\\]-]{1,12}") {
        let mut json = good_json();
        let at = at.min(json.len());
        let end = (at + part.len()).min(json.len());
        json.replace_range(at..end, &part);
        read(&with_json(&json));
    }

    #[test]
    fn numbers_may_be_any(which in 0usize..40, to in any::<u64>(), shift in 0u32..64) {
        let json = good_json();
        let digits = |window: &str| window.bytes().all(|byte| byte.is_ascii_digit());
        let mut parts: Vec<String> = json
            .split_inclusive(|letter: char| !letter.is_ascii_digit())
            .map(str::to_owned)
            .collect();
        let numbers: Vec<usize> = (0..parts.len())
            .filter(|&part| parts[part].len() > 1 && digits(&parts[part][..parts[part].len() - 1]))
            .collect();
        let part = &mut parts[numbers[which % numbers.len()]];
        let end = part.pop().unwrap();
        *part = format!("{}{end}", to >> shift);
        read(&with_json(&parts.concat()));
    }

    #[test]
    fn anything_is_read(bytes in prop::collection::vec(any::<u8>(), 0..2000), version in 0u8..4) {
        let mut bytes = bytes;
        read(&bytes);
        let start = [b'L', b'U', b'K', b'S', 0xba, 0xbe, 0, version];
        bytes.splice(..bytes.len().min(8), start);
        read(&bytes);
    }
}

/// Replaces `from` with `to` in the JSON, and returns the error of reading or unlocking the header.
fn refused(from: &str, to: &str) -> String {
    let json = good_json();
    assert!(json.contains(from), "{from} in {json}");
    let bytes = with_json(&json.replace(from, to));
    let header = Header::read(&bytes);
    let opened = header.and_then(|header| header.unlock(&bytes, &passphrase("key")));
    let error = opened.unwrap_err().to_string();
    assert!(!error.contains('\n') && error.len() < 500, "{error}");
    error
}

#[test]
fn expensive_slots_are_not_tried() {
    let json = good_json();
    // `create` chooses these parameters by measuring the machine.
    let chosen = |name: &str| {
        let name = format!("\"{name}\":");
        let value = json.split(&name).nth(1).unwrap();
        name + value.split(',').next().unwrap()
    };
    let (memory, time, cpus) = (chosen("memory"), chosen("time"), chosen("cpus"));
    assert!(refused(&memory, "\"memory\":1048577").contains("memory"));
    assert!(refused(&time, "\"time\":4000000000").contains("s, and at most"));
    assert!(refused(&cpus, "\"cpus\":5").contains("threads"));
    assert!(refused(&cpus, "\"cpus\":0").contains("impossible"));
    assert!(refused(&time, "\"time\":0").contains("impossible"));
    assert!(refused("\"iterations\":1000", "\"iterations\":4294967295").contains("digest"));
    let mut bytes = HEADERS[0].clone();
    bytes[212..216].fill(0xff);
    let header = Header::read(&bytes).unwrap();
    let error = header.unlock(&bytes, &passphrase("key")).unwrap_err();
    assert!(error.to_string().contains("at most 60"), "{error}");
}

#[test]
fn what_is_not_supported_is_named() {
    let requirements = "\"requirements\":{\"mandatory\":[\"online-reencrypt-v2\"]},\"json_size\"";
    assert!(refused("\"json_size\"", requirements).contains("online-reencrypt-v2"));
    let integrity = "\"integrity\":{\"type\":\"aead\"},\"iv_tweak\"";
    assert!(refused("\"iv_tweak\"", integrity).contains("integrity"));
    let second = "\"segments\":{\"1\":{},";
    assert!(refused("\"segments\":{", second).contains("2 segments"));
    assert!(refused("\"sector_size\":512", "\"sector_size\":8192").contains("8192"));
    assert!(refused("\"crypt\"", "\"hw-opal\"").contains("hw-opal"));
    assert!(refused("\"argon2id\"", "\"scrypt\"").contains("scrypt"));
    assert!(refused("\"stripes\":4000", "\"stripes\":4001").contains("4001"));
    assert!(refused("\"32768\"", "\"16384\"").contains("key slot 0"));
    assert!(refused("\"16744448\"", "\"999999999\"").contains("999999999"));
    assert!(refused("\"offset\":\"16777216\"", "\"offset\":\"4096\"").contains("4096"));
}

#[test]
fn overlapping_slots_are_refused() {
    let slot = |json: &str| {
        let start = json.find("\"0\":{\"af\"").unwrap();
        let end = json.find("},\"segments\"").unwrap();
        json[start + 3..end].to_owned()
    };
    let json = good_json();
    let second = format!("\"keyslots\":{{\"1\"{},", slot(&json));
    let error = refused("\"keyslots\":{", &second);
    assert!(error.contains("overlap"), "{error}");
}
