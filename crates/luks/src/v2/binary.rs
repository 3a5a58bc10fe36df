//! The binary header (LUKS2 specification, section 2.1).
//!
//! A LUKS2 header has two copies. The second one follows the JSON area of the first one.

use crate::bytes::{Bytes, array_at, put, text, u16_at, u64_at};
use crate::error::Result;
use crate::hash::Hash;

/// Size of a binary header in bytes; the JSON area follows it.
pub const LEN: usize = 4096;
/// The possible sizes in bytes of a binary header with its JSON area.
///
/// Each of them is also a possible offset of the second copy.
pub const COPY_LENS: [usize; 9] = [
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
];

const MAGICS: [[u8; 6]; 2] = [*b"LUKS\xba\xbe", *b"SKUL\xba\xbe"];
const VERSION: usize = 6;
const COPY_LEN: usize = 8;
const SEQUENCE: usize = 16;
const LABEL: usize = 24;
const HASH: usize = 72;
const HASH_LEN: usize = 32;
const SALT: usize = 104;
const UUID: usize = 168;
const UUID_LEN: usize = 40;
const SUBSYSTEM: usize = 208;
const LABEL_LEN: usize = 48;
const OFFSET: usize = 256;
const CHECKSUM: usize = 448;
const CHECKSUM_LEN: usize = 64;

/// A copy of the header, of which a disk has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    First,
    Second,
}

/// The fields that are the same in both copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// Size in bytes of a binary header with its JSON area.
    pub copy_len: usize,
    /// Sequence number, which every change increases.
    pub sequence: u64,
    pub label: [u8; LABEL_LEN],
    pub subsystem: [u8; LABEL_LEN],
    pub uuid: [u8; UUID_LEN],
    /// Hash of the checksum.
    pub hash: Hash,
}

/// A copy whose checksum is correct.
pub struct Valid {
    pub binary: Binary,
    /// Salt whose only purpose is to make the checksums of the two copies differ.
    pub salt: [u8; 64],
    /// The JSON area including its padding.
    pub json: Vec<u8>,
}

impl Binary {
    /// Returns the UUID as printable text.
    pub fn uuid(&self) -> String {
        text(&self.uuid)
    }

    /// Returns the offset of a copy in bytes.
    pub fn offset(&self, copy: Copy) -> u64 {
        match copy {
            Copy::First => 0,
            Copy::Second => self.copy_len as u64,
        }
    }

    /// Encodes a copy to write at [`Binary::offset`]. `json` must fit into the JSON area.
    pub fn encode(&self, copy: Copy, salt: &[u8; 64], json: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; self.copy_len];
        put(&mut bytes, 0, &MAGICS[copy as usize]);
        put(&mut bytes, VERSION, &2u16.to_be_bytes());
        put(&mut bytes, COPY_LEN, &(self.copy_len as u64).to_be_bytes());
        put(&mut bytes, SEQUENCE, &self.sequence.to_be_bytes());
        put(&mut bytes, LABEL, &self.label);
        put(&mut bytes, HASH, self.hash.name().as_bytes());
        put(&mut bytes, SALT, salt);
        put(&mut bytes, UUID, &self.uuid);
        put(&mut bytes, SUBSYSTEM, &self.subsystem);
        put(&mut bytes, OFFSET, &self.offset(copy).to_be_bytes());
        put(&mut bytes, LEN, json);
        let checksum = self.hash.digest(&[&bytes]);
        put(&mut bytes, CHECKSUM, &checksum);
        bytes
    }

    /// Returns whether `json` fits into the JSON area with a zero byte after it.
    pub fn fits(&self, json: &[u8]) -> bool {
        json.len() < self.copy_len - LEN
    }
}

/// Reads the copy at `at`. Returns `None` if no copy has a correct checksum.
pub fn read(bytes: &dyn Bytes, copy: Copy, at: u64) -> Result<Option<Valid>> {
    let len = bytes.len()?;
    if len.saturating_sub(at) < LEN as u64 {
        return Ok(None);
    }
    let mut start = vec![0; LEN];
    bytes.read_at(&mut start, at)?;
    let Some(binary) = decode(&start, copy, at) else {
        return Ok(None);
    };
    if len - at < binary.copy_len as u64 {
        return Ok(None);
    }
    let mut json = vec![0; binary.copy_len - LEN];
    bytes.read_at(&mut json, at + LEN as u64)?;
    let stored: [u8; CHECKSUM_LEN] = array_at(&start, CHECKSUM);
    put(&mut start, CHECKSUM, &[0; CHECKSUM_LEN]);
    if !stored.starts_with(&binary.hash.digest(&[&start, &json])) {
        return Ok(None);
    }
    Ok(Some(Valid {
        binary,
        salt: array_at(&start, SALT),
        json,
    }))
}

/// Decodes the first [`LEN`] bytes of a copy. Returns `None` if they are invalid.
fn decode(start: &[u8], copy: Copy, at: u64) -> Option<Binary> {
    let copy_len = usize::try_from(u64_at(start, COPY_LEN)).ok()?;
    let right = start.starts_with(&MAGICS[copy as usize])
        && u16_at(start, VERSION) == 2
        && COPY_LENS.contains(&copy_len)
        && u64_at(start, OFFSET) == at;
    let binary = Binary {
        copy_len,
        sequence: u64_at(start, SEQUENCE),
        label: array_at(start, LABEL),
        subsystem: array_at(start, SUBSYSTEM),
        uuid: array_at(start, UUID),
        hash: Hash::named(&text(&start[HASH..][..HASH_LEN]))?,
    };
    (right && binary.offset(copy) == at).then_some(binary)
}
