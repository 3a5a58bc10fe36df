//! Numbers and small structures of the protocol. All fields are big-endian.
//!
//! - `numbers` has constants by group, each with its section of proto.md.
//! - `handshake` has headers of options and of replies to options.
//! - `transmission` has headers of requests and replies.
//! - `error` has the errors of replies.

mod error;
mod handshake;
mod numbers;
mod transmission;

pub use error::{ErrorCode, errno};
pub use handshake::{BlockSizes, ExportInfo, Info, OptionHeader, OptionReplyHeader};
pub use numbers::*;
pub use transmission::{
    ChunkHeader, NotAReply, NotARequest, Replies, ReplyHeader, RequestHeader, simple_reply,
};

#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

/// Returns the big-endian number at offset `at`.
///
/// # Panics
/// Panics if `bytes` end before the number does.
#[inline]
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

/// Returns the big-endian number at offset `at`, and panics like [`u16_at`].
#[inline]
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// Returns the big-endian number at offset `at`, and panics like [`u16_at`].
#[inline]
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Returns a text of a server without control characters, so that it fits on one line.
pub fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).collect()
}
