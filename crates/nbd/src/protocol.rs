//! The protocol's numbers, and its small structures as bytes. All of it is
//! big-endian.
//!
//! - `numbers` are by group, each with its section of proto.md,
//! - `handshake` has headers of options and of the replies to them,
//! - `transmission` has headers of requests and replies,
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

/// The number there.
///
/// # Panics
/// When `bytes` end before it does.
#[inline]
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

/// Likewise.
#[inline]
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// Likewise.
#[inline]
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// What a server says, fit for one line.
pub fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).collect()
}
