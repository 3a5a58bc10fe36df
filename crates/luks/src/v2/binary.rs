//! The binary header (LUKS2 spec 2.1), of which there are two: the second
//! follows the first one's JSON area.

use crate::bytes::{Bytes, array_at, put, text, u16_at, u64_at};
use crate::error::Result;
use crate::hash::Hash;

/// Bytes of a binary header; the JSON area follows.
pub const LEN: usize = 4096;
/// Bytes of a binary header and its JSON area: one of these, which is also
/// where the second one may be.
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

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    First,
    Second,
}

/// What both have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// Bytes of a binary header and its JSON area.
    pub copy_len: usize,
    /// Increased by every change.
    pub sequence: u64,
    pub label: [u8; LABEL_LEN],
    pub subsystem: [u8; LABEL_LEN],
    pub uuid: [u8; UUID_LEN],
    /// Of the checksum.
    pub hash: Hash,
}

/// A copy with a right checksum.
pub struct Valid {
    pub binary: Binary,
    /// Only to make the checksums of copies differ.
    pub salt: [u8; 64],
    /// With its padding.
    pub json: Vec<u8>,
}

impl Binary {
    /// The UUID for people.
    pub fn uuid(&self) -> String {
        text(&self.uuid)
    }

    /// Where that copy is.
    pub fn offset(&self, copy: Copy) -> u64 {
        match copy {
            Copy::First => 0,
            Copy::Second => self.copy_len as u64,
        }
    }

    /// A copy to be written at [`Binary::offset`]. `json` fits into it.
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

    /// Whether as much JSON fits, with a zero byte at the end.
    pub fn fits(&self, json: &[u8]) -> bool {
        json.len() < self.copy_len - LEN
    }
}

/// The copy at `at`, or `None` where there is none with a right checksum.
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

/// Of the first [`LEN`] bytes, if they make sense.
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
