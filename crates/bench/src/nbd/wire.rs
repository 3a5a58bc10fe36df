//! The protocol's numbers and headers, after doc/proto.md of the NBD project
//! and its branch extension-ext-header. All of it is big-endian.

use crate::port::Op;

pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags, and the client's.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
pub const NO_ZEROES: u16 = 1 << 1;

/// Options.
pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Replies to options.
pub const REP_ACK: u32 = 1;
pub const REP_INFO: u32 = 3;
pub const REP_ERROR: u32 = 1 << 31;
pub const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
pub const REP_ERR_POLICY: u32 = REP_ERROR | 2;
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR | 6;

pub const INFO_EXPORT: u16 = 0;
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;

/// Commands and their flags.
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_TRIM: u16 = 4;
const CMD_WRITE_ZEROES: u16 = 6;
const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// Chunks.
pub const CHUNK_DONE: u16 = 1 << 0;
pub const CHUNK_NONE: u16 = 0;
pub const CHUNK_DATA: u16 = 1;
pub const CHUNK_HOLE: u16 = 2;
/// This bit makes any type an error.
pub const CHUNK_ERROR: u16 = 1 << 15;

/// The longest header of a request.
pub const MAX_REQUEST: usize = 32;

/// The form of replies, and with the last that of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Replies {
    Simple,
    Structured,
    Extended,
}

impl Replies {
    /// The protocol's word.
    pub fn name(self) -> &'static str {
        match self {
            Replies::Simple => "simple replies",
            Replies::Structured => "structured replies",
            Replies::Extended => "extended headers",
        }
    }
}

/// The protocol's command.
pub fn command(op: Op) -> u16 {
    match op {
        Op::Read => CMD_READ,
        Op::Write => CMD_WRITE,
        Op::Flush => CMD_FLUSH,
        Op::Discard => CMD_TRIM,
        Op::WriteZeroes => CMD_WRITE_ZEROES,
    }
}

/// Appends a request's header.
#[inline(always)]
pub fn put_request(
    out: &mut Vec<u8>,
    form: Replies,
    command: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) {
    let extended = form == Replies::Extended;
    let (magic, flags) = match extended {
        true if command == CMD_WRITE => (EXTENDED_REQUEST_MAGIC, CMD_FLAG_PAYLOAD_LEN),
        true => (EXTENDED_REQUEST_MAGIC, 0),
        false => (REQUEST_MAGIC, 0),
    };
    out.extend_from_slice(&magic.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&command.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    match extended {
        true => out.extend_from_slice(&u64::from(len).to_be_bytes()),
        false => out.extend_from_slice(&len.to_be_bytes()),
    }
}

/// A reply's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    Simple {
        error: u32,
        cookie: u64,
    },
    Chunk {
        flags: u16,
        kind: u16,
        cookie: u64,
        /// Of the request; extended headers only.
        offset: Option<u64>,
        /// Of the payload.
        len: u64,
    },
}

/// Reads a header from the first bytes of a reply: with its length, none when
/// it is not all there. An error is a magic number that the form does not have.
#[inline(always)]
pub fn header(bytes: &[u8], form: Replies) -> Result<Option<(Header, usize)>, u32> {
    let Some(magic) = u32_at(bytes, 0) else {
        return Ok(None);
    };
    match (magic, form) {
        (SIMPLE_MAGIC, Replies::Simple | Replies::Structured) => Ok(simple(bytes)),
        (CHUNK_MAGIC, Replies::Structured) => Ok(chunk(bytes)),
        (EXTENDED_MAGIC, Replies::Extended) => Ok(extended(bytes)),
        (other, _) => Err(other),
    }
}

#[inline(always)]
fn simple(bytes: &[u8]) -> Option<(Header, usize)> {
    let error = u32_at(bytes, 4)?;
    let cookie = u64_at(bytes, 8)?;
    Some((Header::Simple { error, cookie }, 16))
}

#[inline(always)]
fn chunk(bytes: &[u8]) -> Option<(Header, usize)> {
    let header = Header::Chunk {
        flags: u16_at(bytes, 4)?,
        kind: u16_at(bytes, 6)?,
        cookie: u64_at(bytes, 8)?,
        offset: None,
        len: u64::from(u32_at(bytes, 16)?),
    };
    Some((header, 20))
}

#[inline(always)]
fn extended(bytes: &[u8]) -> Option<(Header, usize)> {
    let header = Header::Chunk {
        flags: u16_at(bytes, 4)?,
        kind: u16_at(bytes, 6)?,
        cookie: u64_at(bytes, 8)?,
        offset: Some(u64_at(bytes, 16)?),
        len: u64_at(bytes, 24)?,
    };
    Some((header, 32))
}

#[inline(always)]
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

#[inline(always)]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

#[inline(always)]
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}
