//! The protocol's numbers and headers, after doc/proto.md of the NBD project.
//! All numbers are big-endian.

pub(super) const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, and the client's.
pub(super) mod greeting {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options.
pub(super) mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub(super) mod answer {
    pub const ACK: u32 = 1;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR | 1;
    pub const ERR_POLICY: u32 = ERROR | 2;
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
}

/// What NBD_OPT_GO tells of.
pub(super) mod info {
    pub const EXPORT: u16 = 0;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export offers.
pub(super) mod export_flag {
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// What a request asks for.
pub(super) mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub(super) mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
}

/// Types of chunks in structured replies.
pub(super) mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    /// This bit makes any type an error.
    pub const ERROR: u16 = 1 << 15;
    pub const ERROR_OFFSET: u16 = ERROR + 2;
}

/// The last chunk of its reply.
pub(super) const REPLY_FLAG_DONE: u16 = 1;

/// Of base:allocation.
pub(super) mod state {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
}

/// The protocol's limit of a string.
pub(super) const MAX_STRING: usize = 4096;

/// Bytes of a request's header.
pub(super) const REQUEST_LEN: usize = 28;

/// A request's header.
#[inline]
pub(super) fn request(
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The errno of an error in a reply (NBD, "Error values").
pub(super) fn errno(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        // 5, and 108 (the server is shutting down): this request is lost.
        _ => libc::EIO,
    }
}

#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

#[inline]
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

#[inline]
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

#[inline]
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// What a server says, fit for one line.
pub(super) fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).collect()
}
