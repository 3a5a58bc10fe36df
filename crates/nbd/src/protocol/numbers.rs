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
    /// The peer uses the fixed newstyle handshake, in which each option gets a reply.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// Omits the 124 zero bytes at the end of the reply to NBD_OPT_EXPORT_NAME, if both peers set
    /// this flag.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client may send ("Option types").
pub mod opt {
    /// Selects an export and ends the handshake; failure closes the connection without a reply.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake without an export.
    pub const ABORT: u32 = 2;
    /// Requests the names of all exports.
    pub const LIST: u32 = 3;
    /// Requests TLS, which begins after the reply [`rep::ACK`](super::rep::ACK).
    pub const STARTTLS: u32 = 5;
    /// Requests information about an export without selecting the export.
    pub const INFO: u32 = 6;
    /// Selects an export, requests information about it, and ends the handshake.
    pub const GO: u32 = 7;
    /// Requests structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Requests the names of the metadata contexts of an export that match the client's queries.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects the metadata contexts of later block status requests.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Requests extended headers, which imply structured replies.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options ("Option reply types").
pub mod rep {
    /// The server accepts the option, or has sent all replies to it.
    pub const ACK: u32 = 1;
    /// Name of an export, in reply to [`opt::LIST`](super::opt::LIST).
    pub const SERVER: u32 = 2;
    /// Information about an export, of one of the types in [`info`](super::info).
    pub const INFO: u32 = 3;
    /// Name and id of a metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Bit that marks a type as an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// The server's configuration prohibits the option.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// The option is malformed, or not allowed in this state of the handshake.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// The option requires TLS, which the client has not started.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    /// The export can be used only by a client that has requested the export's block sizes.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    /// The option is longer than the server accepts.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    /// The export can be used only by a client that has negotiated extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Types of information in replies to INFO and GO ("Option reply types").
pub mod info {
    /// Size and flags of the export: see [`ExportInfo`](super::super::ExportInfo).
    pub const EXPORT: u16 = 0;
    /// Canonical name of the export.
    pub const NAME: u16 = 1;
    /// Description of the export for users.
    pub const DESCRIPTION: u16 = 2;
    /// Limits for the sizes of requests: see [`BlockSizes`](super::super::BlockSizes).
    pub const BLOCK_SIZE: u16 = 3;
}

/// Properties of an export ("Transmission flags").
pub mod export_flag {
    /// The flags are valid; always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server supports [`command::FLUSH`](super::command::FLUSH).
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The server supports [`command_flag::FUA`](super::command_flag::FUA).
    pub const SEND_FUA: u16 = 1 << 3;
    /// The storage is a rotating disk, for which sequential requests are faster.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// The server supports [`command::TRIM`](super::command::TRIM).
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The server supports [`command::WRITE_ZEROES`](super::command::WRITE_ZEROES).
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The server supports [`command_flag::DF`](super::command_flag::DF).
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection also covers the completed writes of the client's other
    /// connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The server supports [`command::CACHE`](super::command::CACHE).
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The server supports [`command_flag::FAST_ZERO`](super::command_flag::FAST_ZERO).
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// The server supports block status requests with a payload, which selects metadata contexts.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Commands of requests ("Request types").
pub mod command {
    /// Reads data.
    pub const READ: u16 = 0;
    /// Writes the data that follows the header.
    pub const WRITE: u16 = 1;
    /// Ends the connection. The server completes the requests in flight and sends no reply.
    pub const DISC: u16 = 2;
    /// Makes all completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Discards the data of a range, which may read as anything afterwards.
    pub const TRIM: u16 = 4;
    /// Reads a range into the server's cache, as a hint.
    pub const CACHE: u16 = 5;
    /// Writes zeroes to a range without a payload.
    pub const WRITE_ZEROES: u16 = 6;
    /// Reports the status of a range in the selected metadata contexts.
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
    /// The data must be durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// A write of zeroes must not deallocate the range.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The reply to a read must not be fragmented: all data comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// The reply to a block status request has only the first extent of each context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// A write of zeroes fails with ENOTSUP if it would be as slow as a write of data.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// A payload follows the header, and the header's length is that of the payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks in structured and extended replies ("Structured reply types").
pub mod chunk {
    /// No payload; only the last chunk of a reply may have this type.
    pub const NONE: u16 = 0;
    /// Offset, and the data that was read there.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of a range that reads as zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a metadata context with lengths and flags of 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of a metadata context with lengths and flags of 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit that marks a type as an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Error of the whole request, with a message.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// Error at an offset, with a message.
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
/// Prefix of the context that continues to report changes after [`CHANGES_BEGIN`].
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
    /// No storage is allocated for the extent (base:allocation).
    pub const HOLE: u32 = 1 << 0;
    /// The extent reads as zeroes (base:allocation).
    pub const ZERO: u32 = 1 << 1;
    /// The extent is dirty (dirty bitmaps).
    pub const DIRTY: u32 = 1 << 0;
}

/// Maximum length of a string in bytes ("Conventions").
pub const MAX_STRING: usize = 4096;

/// Maximum length of a payload in bytes that every peer should accept, and the limit if none was
/// negotiated ("Size constraints").
pub const MAX_PAYLOAD: u32 = 32 << 20;
