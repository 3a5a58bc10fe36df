//! The JSON area of a header (LUKS2 specification, section 3), as far as Fathom uses it.
//!
//! Changes to a header preserve all fields that these types do not name.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;

/// The top-level JSON object.
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

/// Features that a program must support before it may use the header.
#[derive(Deserialize, Default)]
pub struct Requirements {
    #[serde(default)]
    pub mandatory: Vec<String>,
}

/// The fields that key slots of every type have.
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

/// A key slot of the type `luks2`.
#[derive(Deserialize)]
pub struct Keyslot {
    pub key_size: u64,
    pub af: Af,
    pub area: Area,
    pub kdf: Kdf,
    /// Priority from 0 (ignore) to 2 (prefer).
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
    /// Size in bytes as a decimal number, or "dynamic".
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

/// A 64-bit number, encoded in JSON as a string of decimal digits.
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

/// Parses `text` as a number. Returns `None` if `text` contains anything but digits.
pub fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Parses a JSON area: an object followed by zero bytes.
pub fn parse(area: &[u8]) -> Result<Value> {
    let end = area
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(area.len());
    serde_json::from_slice(&area[..end]).map_err(|why| wrong("its JSON", &why))
}

/// Converts `value` to `T`. On failure, the error names `place`, the part of the header.
pub fn typed<T: DeserializeOwned>(value: &Value, place: &str) -> Result<T> {
    T::deserialize(value).map_err(|why| wrong(place, &why))
}

fn wrong(place: &str, why: &serde_json::Error) -> Error {
    Error::damaged(format!("{place} is wrong: {}", shown(&why.to_string())))
}

/// Prepares text of a header for a message: truncates it and replaces control characters.
pub fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let printable = |letter: char| match letter.is_control() {
        true => '?',
        false => letter,
    };
    text.chars().take(MOST).map(printable).collect()
}
