//! Parses the data of options and encodes replies to them.

use fathom_nbd::protocol::{MAX_STRING, OptionReplyHeader};
use std::io::{self, Read};

/// Reader of an option's fields. Methods return None if the data is too short.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Reads a string with a 32-bit length in front.
    pub fn string(&mut self) -> Result<&'a str, &'static str> {
        let len = self.u32().ok_or(TOO_SHORT)?;
        let bytes = self.bytes(len as usize).ok_or(TOO_SHORT)?;
        parse_string(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

pub const TOO_SHORT: &str = "the option's data is too short";

/// Parses a string according to proto.md.
pub fn parse_string(bytes: &[u8]) -> Result<&str, &'static str> {
    if bytes.len() > MAX_STRING {
        return Err("a string exceeds 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("a string is not UTF-8 without NUL"),
    }
}

/// Appends a reply to `option`.
pub fn push_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let header = OptionReplyHeader {
        option,
        kind,
        len: len as u32,
    };
    out.extend_from_slice(&header.to_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// Reads and drops `len` bytes.
pub fn skip(from: &mut impl Read, mut len: u64) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while len > 0 {
        let part = len.min(buffer.len() as u64) as usize;
        from.read_exact(&mut buffer[..part])?;
        len -= part as u64;
    }
    Ok(())
}
