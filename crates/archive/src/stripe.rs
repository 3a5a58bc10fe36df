//! The encoding of a stripe as an object in an archive.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 4 | magic |
//! | 4 | 1 | version: 1 |
//! | 5 | 1 | encoding: 0 for uncompressed, 1 for a zstd frame |
//! | 6 | 2 | zeroes |
//! | 8 | 4 | size of the stripe in bytes, little-endian |
//! | 12 | 4 | zeroes |
//! | 16 | | the data |

use crate::hash::Hash;
use std::cell::RefCell;
use zstd_safe::{CCtx, DCtx};

const MAGIC: &[u8; 4] = b"FStr";
const VERSION: u8 = 1;
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;
/// Size of the header in bytes; the data follows it.
pub(crate) const HEADER: usize = 16;
/// Compression level at which zstd is about as fast as a network.
const LEVEL: i32 = 3;

/// An encoded stripe, ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Hash of the stripe before its encoding, from which the object's name is derived.
    pub hash: Hash,
    /// Contents of the object to store.
    pub object: Vec<u8>,
}

/// Encodes a stripe, compressing it if that makes it smaller.
pub fn encode(bytes: &[u8]) -> Encoded {
    Encoded {
        hash: Hash::of(bytes),
        object: object_of(bytes),
    }
}

/// Returns the object for a stripe; it is never larger than the stripe and a header.
pub(crate) fn object_of(bytes: &[u8]) -> Vec<u8> {
    let mut object = vec![0; HEADER + bytes.len()];
    let (header, data) = object.split_at_mut(HEADER);
    header[..4].copy_from_slice(MAGIC);
    header[4] = VERSION;
    header[8..12].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    // The buffer is too small for compressed data that would not be smaller than the stripe.
    let room = bytes.len().saturating_sub(1);
    let compressed = COMPRESSOR.with_borrow_mut(|c| c.compress(&mut data[..room], bytes, LEVEL));
    match compressed {
        Ok(len) => {
            header[5] = ZSTD;
            object.truncate(HEADER + len);
        }
        Err(_) => {
            header[5] = PLAIN;
            data.copy_from_slice(bytes);
        }
    }
    object
}

/// Decodes a stripe, which must have `len` bytes and this hash. The error says what is wrong.
pub fn decode(object: &[u8], len: usize, hash: &Hash) -> Result<Vec<u8>, String> {
    let bytes = unpack(object, len)?;
    match Hash::of(&bytes) == *hash {
        true => Ok(bytes),
        false => Err("the data does not match the name".into()),
    }
}

/// Decodes a stripe of `len` bytes without checking its hash.
///
/// Uses no more memory than `len` bytes for the result.
pub(crate) fn unpack(object: &[u8], len: usize) -> Result<Vec<u8>, String> {
    let Some((header, data)) = object.split_first_chunk::<HEADER>() else {
        return Err("truncated".into());
    };
    if !header.starts_with(MAGIC) {
        return Err("not a stripe".into());
    }
    if header[4] != VERSION {
        let version = header[4];
        return Err(format!(
            "the stripe's version is {version}, and this program knows {VERSION}; use a newer \
             fathom"
        ));
    }
    let said = u32::from_le_bytes(*header[8..].first_chunk().expect("a word"));
    if said as usize != len {
        return Err(format!(
            "the stripe has {said} bytes, and {len} are expected"
        ));
    }
    if header[6..8] != [0; 2] || header[12..] != [0; 4] {
        return Err("reserved bytes are not 0".into());
    }
    match header[5] {
        PLAIN if data.len() == len => Ok(data.to_vec()),
        PLAIN => Err(format!("{} of {len} bytes", data.len())),
        ZSTD => decompress(data, len),
        other => Err(format!("unknown encoding ({other})")),
    }
}

fn decompress(data: &[u8], len: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; len];
    let done = DECOMPRESSOR.with_borrow_mut(|d| d.decompress(&mut bytes[..], data));
    match done {
        Ok(done) if done == len => Ok(bytes),
        Ok(done) => Err(format!("decompresses to {done} bytes instead of {len}")),
        Err(code) => {
            let problem = zstd_safe::get_error_name(code);
            Err(format!("cannot be decompressed: {problem}"))
        }
    }
}

thread_local! {
    // Creating a context takes longer than compressing a small stripe with it.
    static COMPRESSOR: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    static DECOMPRESSOR: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_cannot_be_compressed_is_stored_as_it_is() {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let random: Vec<u8> = std::iter::repeat_with(&mut next).take(100_000).collect();
        let stored = encode(&random);
        assert_eq!(stored.object.len(), HEADER + random.len());
        assert_eq!(stored.object[HEADER..], random);
        assert_eq!(
            decode(&stored.object, random.len(), &stored.hash).unwrap(),
            random
        );
        let text = b"again and ".repeat(10_000);
        let stored = encode(&text);
        assert!(stored.object.len() < 1000);
        assert_eq!(
            decode(&stored.object, text.len(), &stored.hash).unwrap(),
            text
        );
        for tiny in [&b""[..], b"1", b"12"] {
            let stored = encode(tiny);
            assert_eq!(
                decode(&stored.object, tiny.len(), &stored.hash).unwrap(),
                tiny
            );
        }
    }

    /// Neither a large decompressed size nor a wrong size in the header makes the decoder use more
    /// memory.
    #[test]
    fn a_bomb_does_not_go_off() {
        let bomb = encode(&vec![0; 64 << 20]);
        let mut object = bomb.object.clone();
        let problem = decode(&object, 64 << 10, &bomb.hash).unwrap_err();
        assert!(problem.contains("67108864"), "{problem}");
        object[8..12].copy_from_slice(&(64_u32 << 10).to_le_bytes());
        let problem = decode(&object, 64 << 10, &bomb.hash).unwrap_err();
        assert!(problem.contains("decompressed"), "{problem}");
    }

    proptest! {
        #[test]
        fn nothing_else_is_taken_for_a_stripe(
            bytes in proptest::collection::vec(0u8..4, 1..3000),
            at: proptest::sample::Index,
            with in 1u8..,
        ) {
            let stored = encode(&bytes);
            prop_assert_eq!(&decode(&stored.object, bytes.len(), &stored.hash).unwrap(), &bytes);
            let mut changed = stored.object.clone();
            let at = at.index(changed.len());
            changed[at] ^= with;
            if let Ok(other) = decode(&changed, bytes.len(), &stored.hash) {
                prop_assert_eq!(&other, &bytes);
            }
            prop_assert!(decode(&stored.object[..at], bytes.len(), &stored.hash).is_err());
            prop_assert!(decode(&stored.object, bytes.len() + 1, &stored.hash).is_err());
        }
    }
}
