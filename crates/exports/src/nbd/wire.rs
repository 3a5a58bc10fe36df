//! The messages of the transmission phase, as bytes. All numbers are
//! big-endian.

/// Transmission flags: what an export offers (NBD, "Transmission flags").
pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const ROTATIONAL: u16 = 1 << 4;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Flags of a request.
pub mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// What a request asks for.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Types of chunks in structured and extended replies.
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = (1 << 15) + 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Of base:allocation.
pub mod state {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
}

/// The last chunk of its reply.
pub const REPLY_FLAG_DONE: u16 = 1;

/// The payload that every server should take (NBD, "Size constraints").
pub const MAX_PAYLOAD: u32 = 32 << 20;

const COMPACT_REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The errors of a reply (NBD, "Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    NotPermitted = 1,
    Io = 5,
    NoMemory = 12,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    NotSupported = 95,
    Shutdown = 108,
}

impl ErrorCode {
    /// The error of a disk that failed with this errno.
    pub fn from_errno(errno: i32) -> ErrorCode {
        match errno {
            libc::EPERM | libc::EROFS | libc::EACCES => ErrorCode::NotPermitted,
            libc::ENOMEM => ErrorCode::NoMemory,
            libc::EINVAL => ErrorCode::Invalid,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrorCode::NoSpace,
            libc::EOVERFLOW => ErrorCode::Overflow,
            libc::EOPNOTSUPP => ErrorCode::NotSupported,
            libc::ESHUTDOWN => ErrorCode::Shutdown,
            _ => ErrorCode::Io,
        }
    }

    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            ErrorCode::NotPermitted => "not permitted",
            ErrorCode::Io => "input/output error",
            ErrorCode::NoMemory => "out of memory",
            ErrorCode::Invalid => "invalid argument",
            ErrorCode::NoSpace => "no space left",
            ErrorCode::Overflow => "value too large",
            ErrorCode::NotSupported => "not supported",
            ErrorCode::Shutdown => "the server is shutting down",
        }
    }
}

/// Which headers a connection uses; agreed upon in the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replies {
    #[default]
    Simple,
    /// NBD_OPT_STRUCTURED_REPLY
    Structured,
    /// NBD_OPT_EXTENDED_HEADERS
    Extended,
}

impl Replies {
    /// Bytes of a request's header.
    pub const fn request_len(self) -> usize {
        match self {
            Replies::Extended => 32,
            Replies::Simple | Replies::Structured => 28,
        }
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub flags: u16,
    pub command: u16,
    /// The client's own; goes back with the replies.
    pub cookie: u64,
    pub offset: u64,
    /// Of the range, or of the payload that follows.
    pub len: u64,
}

/// What is there instead of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:#010x} where a request should begin")]
pub struct NotARequest(pub u32);

impl RequestHeader {
    /// Read a header; `bytes` are exactly [`Replies::request_len`].
    #[inline]
    pub fn parse(replies: Replies, bytes: &[u8]) -> Result<RequestHeader, NotARequest> {
        let wide = replies == Replies::Extended;
        let expected = if wide {
            EXTENDED_REQUEST_MAGIC
        } else {
            COMPACT_REQUEST_MAGIC
        };
        let magic = u32_at(bytes, 0);
        if magic != expected {
            return Err(NotARequest(magic));
        }
        Ok(RequestHeader {
            flags: u16_at(bytes, 4),
            command: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            len: if wide {
                u64_at(bytes, 24)
            } else {
                u32_at(bytes, 24).into()
            },
        })
    }

    /// The inverse of `parse`, for clients in tests.
    pub fn to_bytes(self, replies: Replies) -> Vec<u8> {
        let wide = replies == Replies::Extended;
        let mut bytes = Vec::with_capacity(32);
        let magic = if wide {
            EXTENDED_REQUEST_MAGIC
        } else {
            COMPACT_REQUEST_MAGIC
        };
        bytes.extend(magic.to_be_bytes());
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        if wide {
            bytes.extend(self.len.to_be_bytes());
        } else {
            bytes.extend((self.len as u32).to_be_bytes());
        }
        bytes
    }

    /// Whether bytes follow the header, as many as `len` says. A write must
    /// say so in extended headers, but QEMU's (up to 10.0 at least) do not.
    #[inline]
    pub fn has_payload(&self, replies: Replies) -> bool {
        let says_so = self.flags & command_flag::PAYLOAD_LEN != 0;
        self.command == command::WRITE || (replies == Replies::Extended && says_so)
    }
}

/// The header of a simple reply; `error` is 0 or an [`ErrorCode`].
#[inline]
pub fn simple_reply(error: u32, cookie: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The header of a chunk, before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    /// Of the request.
    pub offset: u64,
    /// Bytes of payload.
    pub len: u32,
}

impl ChunkHeader {
    #[inline]
    pub fn structured(self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..16]);
        bytes[16..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    #[inline]
    pub fn extended(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&EXTENDED_REPLY_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..16]);
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&u64::from(self.len).to_be_bytes());
        bytes
    }

    #[inline]
    fn common(self, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&self.flags.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_be_bytes());
        bytes[4..12].copy_from_slice(&self.cookie.to_be_bytes());
    }
}

#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

#[inline]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}
