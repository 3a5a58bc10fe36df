//! The JSON of a header (LUKS2 spec 3), as far as it is used here. What is
//! not named is kept as it is when a header is changed.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;

/// All of it.
#[derive(Deserialize)]
pub struct Metadata {
    pub keyslots: BTreeMap<String, Value>,
    pub segments: BTreeMap<String, Value>,
    pub digests: BTreeMap<String, Value>,
    pub config: Config,
}

#[derive(Deserialize)]
pub struct Config {
    pub json_size: Number,
    pub keyslots_size: Number,
    #[serde(default)]
    pub requirements: Requirements,
}

/// What a program must know to touch anything.
#[derive(Deserialize, Default)]
pub struct Requirements {
    #[serde(default)]
    pub mandatory: Vec<String>,
}

/// Of every type of key slot.
#[derive(Deserialize)]
pub struct AnyKeyslot {
    pub r#type: String,
    pub area: AnyArea,
}

#[derive(Deserialize)]
pub struct AnyArea {
    pub r#type: String,
    pub offset: Number,
    pub size: Number,
}

/// Of the type luks2.
#[derive(Deserialize)]
pub struct Keyslot {
    pub key_size: u64,
    pub af: Af,
    pub area: Area,
    pub kdf: Kdf,
    /// 0 to 2.
    pub priority: Option<u64>,
}

#[derive(Deserialize)]
pub struct Af {
    pub r#type: String,
    pub stripes: u64,
    pub hash: String,
}

#[derive(Deserialize)]
pub struct Area {
    pub encryption: String,
    pub key_size: u64,
}

#[derive(Deserialize)]
pub struct Kdf {
    pub r#type: String,
    pub salt: String,
    pub hash: Option<String>,
    pub iterations: Option<u32>,
    pub time: Option<u32>,
    pub memory: Option<u32>,
    pub cpus: Option<u32>,
}

#[derive(Deserialize)]
pub struct Segment {
    pub offset: Number,
    /// A number or "dynamic".
    pub size: String,
    pub iv_tweak: Number,
    pub encryption: String,
    pub sector_size: u32,
    pub integrity: Option<Value>,
    #[serde(default)]
    pub flags: Vec<String>,
}

#[derive(Deserialize)]
pub struct Digest {
    pub r#type: String,
    pub keyslots: Vec<String>,
    pub segments: Vec<String>,
    pub hash: Option<String>,
    pub iterations: Option<u32>,
    pub salt: Option<String>,
    pub digest: Option<String>,
}

/// A number of 64 bits: a string of decimal digits.
#[derive(Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct Number(pub u64);

impl TryFrom<String> for Number {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Number, String> {
        number(&text)
            .map(Number)
            .ok_or_else(|| format!("{} is no number", shown(&text)))
    }
}

/// The number that `text` is; nothing but digits.
pub fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// The value of a JSON area: an object, then zero bytes.
pub fn parse(area: &[u8]) -> Result<Value> {
    let end = area
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(area.len());
    serde_json::from_slice(&area[..end]).map_err(|why| wrong("its JSON", &why))
}

/// What `value` is, or an error that says where in the header it is not.
pub fn typed<T: DeserializeOwned>(value: &Value, place: &str) -> Result<T> {
    T::deserialize(value).map_err(|why| wrong(place, &why))
}

fn wrong(place: &str, why: &serde_json::Error) -> Error {
    Error::damaged(format!("{place} is wrong: {}", shown(&why.to_string())))
}

/// Text of a header for a message: not too long and printable.
pub fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let printable = |letter: char| match letter.is_control() {
        true => '?',
        false => letter,
    };
    text.chars().take(MOST).map(printable).collect()
}
