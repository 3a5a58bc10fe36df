//! Numbers that proto.md names, by their names there without the prefix (for example, NBD_OPT_).

/// "NBDMAGIC", the first number that a server sends ("Newstyle negotiation").
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", the second number that a server sends, and the start of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second number that a server with the oldstyle handshake sends ("Oldstyle negotiation").
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Magic number of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Flags of the server (16 bits) and of the client (32 bits) in the handshake ("Handshake flags",
/// "Client flags").
pub mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client may send ("Option types").
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

/// Replies to options ("Option reply types").
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// Bit that marks a type as an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Types of information in replies to INFO and GO ("Option reply types").
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Properties of an export ("Transmission flags").
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

/// Commands of requests ("Request types").
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
    /// Fathom's own command of a server that takes the disk over: no guest of the old server can
    /// use the disk afterwards.
    ///
    /// Only a client that has negotiated a context of changes may send this command. Offset and
    /// length are 0.
    pub const TAKE_OVER: u16 = 0x4654;
}

/// Flags of a request ("Command flags").
pub mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks in structured and extended replies ("Structured reply types").
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit that marks a type as an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    pub const ERROR: u16 = ERROR_BIT | 1;
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Marks the last chunk of a reply ("Structured reply flags").
pub const REPLY_FLAG_DONE: u16 = 1;

/// The metadata context that reports holes and data ("`base:allocation` metadata context").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Prefix of the context that reports a dirty bitmap, before the bitmap's name
/// (docs/interop/nbd.rst of QEMU).
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// Prefixes of Fathom's own contexts that report changes of a disk to the server that takes the
/// disk over.
///
/// An id that the client chooses follows the prefix. Each change is reported once. The first
/// context forgets all earlier changes; the second continues.
pub const CHANGES_BEGIN: &str = "fathom:changes-begin:";
pub const CHANGES_GO_ON: &str = "fathom:changes-go-on:";

/// Flag of an extent that has changed, in such a context.
pub const CHANGED: u32 = 1 << 0;

/// Returns whether a client may use this id: 1 to 64 ASCII letters, digits and hyphens.
pub fn is_move_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=64).contains(&id.len()) && id.bytes().all(is_plain)
}

/// Flags of extents in base:allocation and in dirty bitmaps.
pub mod state {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
    pub const DIRTY: u32 = 1 << 0;
}

/// Maximum length of a string in bytes ("Conventions").
pub const MAX_STRING: usize = 4096;

/// Maximum length of a payload in bytes that every peer should accept, and the limit if none was
/// negotiated ("Size constraints").
pub const MAX_PAYLOAD: u32 = 32 << 20;
