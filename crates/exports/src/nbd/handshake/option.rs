//! Options and the replies to them, as bytes. "proto.md" in comments is
//! doc/proto.md of NetworkBlockDevice/nbd.

use std::io::{self, Read};

/// "NBDMAGIC", "IHAVEOPT", and what every reply begins with.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Both in the server's flags (16 bits) and in the client's (32 bits).
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
pub const NO_ZEROES: u16 = 1 << 1;

/// What a client may ask for.
pub mod opt {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies.
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub const ERR_SHUTDOWN: u32 = 1 << 31 | 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = 1 << 31 | 8;
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
    pub const ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;
}

/// What INFO and GO tell.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// proto.md, "Conventions": a string has 4096 bytes at most.
pub const MAX_STRING: usize = 4096;

/// An option's header.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl Header {
    pub const LEN: usize = 16;

    /// None: not an option.
    pub fn parse(bytes: &[u8; Header::LEN]) -> Option<Header> {
        let mut fields = Fields(bytes);
        (fields.u64()? == OPTION_MAGIC).then_some(())?;
        Some(Header {
            option: fields.u32()?,
            len: fields.u32()?,
        })
    }
}

/// An option's data, read field by field; None: it is too short.
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

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its length of 32 bits in front.
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

/// A string as proto.md wants it.
pub fn parse_string(bytes: &[u8]) -> Result<&str, &'static str> {
    if bytes.len() > MAX_STRING {
        return Err("a string has more than 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("a string is not UTF-8 without NUL"),
    }
}

/// Append a reply to `option`.
pub fn push_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    for word in [option, kind, len as u32] {
        out.extend_from_slice(&word.to_be_bytes());
    }
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// Read and forget.
pub fn skip(from: &mut impl Read, mut len: u64) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while len > 0 {
        let part = len.min(buffer.len() as u64) as usize;
        from.read_exact(&mut buffer[..part])?;
        len -= part as u64;
    }
    Ok(())
}
