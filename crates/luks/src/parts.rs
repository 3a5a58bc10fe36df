//! The contents common to headers of both versions.

use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::payload::{Iv, Payload};
use crate::slot::{Digest, Slot};

/// The checked contents of a header.
#[derive(Clone, Debug)]
pub struct Parts {
    pub uuid: String,
    pub payload: Payload,
    /// Hash for new slots.
    pub hash: Hash,
    /// Slots in use, ordered by number.
    pub slots: Vec<Slot>,
    pub digest: Digest,
}

/// Returns the sector IVs of `mode`, which is a mode's name in headers.
pub fn iv_of_mode(mode: &str) -> Option<Iv> {
    let narrow = match mode {
        "xts-plain64" => false,
        "xts-plain" => true,
        _ => return None,
    };
    Some(Iv { tweak: 0, narrow })
}

/// Returns the name of the mode in headers; the inverse of [`iv_of_mode`].
pub fn mode_of_iv(iv: Iv) -> &'static str {
    match iv.narrow {
        false => "xts-plain64",
        true => "xts-plain",
    }
}

/// Checks that keys of `bytes` bytes are supported, for a volume key or a key slot's key.
pub fn key_bytes(bytes: u64) -> Result<usize> {
    match bytes {
        32 | 64 => Ok(bytes as usize),
        _ => Err(Error::unsupported(format!(
            "keys of {bytes} bytes are not supported, only of 32 and 64 bytes (AES-128 and \
             AES-256 in XTS mode)"
        ))),
    }
}

/// Returns an error if two areas overlap. `areas` contains slot number, start and end of each area.
pub fn refuse_overlaps(areas: &mut [(u32, u64, u64)]) -> Result<()> {
    areas.sort_by_key(|&(_, start, _)| start);
    for pair in areas.windows(2) {
        let ((one, _, end), (other, start, _)) = (pair[0], pair[1]);
        if start < end {
            return Err(Error::damaged(format!(
                "the key material of key slots {one} and {other} overlaps"
            )));
        }
    }
    Ok(())
}
