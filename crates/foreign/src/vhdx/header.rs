//! Reads the two headers, of which the newer one is valid (section 2.2.2).

use super::crc;
use crate::bytes::{array_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::source::Source;

/// Alignment in bytes of all parts of a file; the headers occupy the first such unit.
pub const ALIGNMENT: u64 = 1 << 20;

const PLACES: [u64; 2] = [64 << 10, 128 << 10];
const LEN: usize = 4096;
const MAGIC: &[u8] = b"head";
const CHECKSUM: usize = 4;
const SEQUENCE: usize = 8;
const LOG_GUID: usize = 48;
const LOG_VERSION: usize = 64;
const VERSION: usize = 66;
const LOG_LEN: usize = 68;
const LOG_AT: usize = 72;
/// Size of all header fields in bytes.
const FIELDS: usize = 80;

/// The location of the log, and the GUID of its valid entries.
pub struct Log {
    pub at: u64,
    /// Size in bytes, a multiple of [`ALIGNMENT`].
    pub len: u32,
    /// GUID of the valid log entries; all zeroes if the log is empty.
    pub guid: [u8; 16],
}

pub fn read(source: &Source) -> Result<Log> {
    if !source.holds(0, 8) || source.array(0, "its start")? != *b"vhdxfile" {
        return Err(Error::Not(Kind::Vhdx));
    }
    let copies = PLACES.map(|at| source.array::<LEN>(at, "a header"));
    let [first, second] = copies;
    let valid = |copy: &[u8; LEN]| copy.starts_with(MAGIC) && crc::is_right(copy, CHECKSUM);
    let mut valid: Vec<_> = { [first?, second?].into_iter() }.filter(valid).collect();
    valid.sort_by_key(|copy| u64_at(copy, SEQUENCE));
    // Disk2vhd writes two identical headers.
    if let [one, other] = &valid[..]
        && u64_at(one, SEQUENCE) == u64_at(other, SEQUENCE)
        && one[..FIELDS] != other[..FIELDS]
    {
        return Err(Error::damaged(
            "neither of its two headers is the newer one",
        ));
    }
    let header = valid.pop();
    let header = header.ok_or_else(|| Error::damaged("it has no header with a right checksum"))?;
    let version = u16_at(&header, VERSION);
    if version != 1 {
        return Err(Error::unsupported(format!(
            "VHDX version {version} is not supported, only 1"
        )));
    }
    log(&header)
}

fn log(header: &[u8; LEN]) -> Result<Log> {
    let version = u16_at(header, LOG_VERSION);
    if version != 0 {
        return Err(Error::unsupported(format!(
            "a VHDX log of version {version} is not supported, only of 0"
        )));
    }
    let (at, len) = (u64_at(header, LOG_AT), u32_at(header, LOG_LEN));
    let is_aligned = at.is_multiple_of(ALIGNMENT) && u64::from(len).is_multiple_of(ALIGNMENT);
    if at < ALIGNMENT || !is_aligned || at.checked_add(len.into()).is_none() {
        return Err(Error::damaged(format!(
            "its log of {len} bytes at {at} is not in a place for it"
        )));
    }
    Ok(Log {
        at,
        len,
        guid: array_at(header, LOG_GUID),
    })
}
