//! What is in a header of either version.

use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::payload::{Iv, Payload};
use crate::slot::{Digest, Slot};

/// What is read from a header, checked.
#[derive(Clone, Debug)]
pub struct Parts {
    pub uuid: String,
    pub payload: Payload,
    /// For new slots.
    pub hash: Hash,
    /// Those in use, by number.
    pub slots: Vec<Slot>,
    pub digest: Digest,
}

/// The IVs of sectors under `mode`, as headers name it.
pub fn iv_of_mode(mode: &str) -> Option<Iv> {
    let narrow = match mode {
        "xts-plain64" => false,
        "xts-plain" => true,
        _ => return None,
    };
    Some(Iv { tweak: 0, narrow })
}

/// The name of a mode that [`iv_of_mode`] knows.
pub fn mode_of_iv(iv: Iv) -> &'static str {
    match iv.narrow {
        false => "xts-plain64",
        true => "xts-plain",
    }
}

/// `bytes` of a volume key or a key slot's key, if they are supported.
pub fn key_bytes(bytes: u64) -> Result<usize> {
    match bytes {
        32 | 64 => Ok(bytes as usize),
        _ => Err(Error::unsupported(format!(
            "keys of {bytes} bytes are not supported, only of 32 and 64 bytes (AES-128 and \
             AES-256 in XTS mode)"
        ))),
    }
}

/// Refuses places that overlap. `areas` are slot number, start and end.
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
