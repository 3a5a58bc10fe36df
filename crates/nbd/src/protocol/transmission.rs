//! Headers of requests and replies (proto.md, "Transmission", "Request message", "Simple reply
//! message" and "Structured reply chunk message").

use super::{command, command_flag, u16_at, u32_at, u64_at};

const COMPACT_REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The headers of a connection, as negotiated in the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Replies {
    /// Compact requests and simple replies, which need no negotiation.
    #[default]
    Simple,
    /// Negotiated by NBD_OPT_STRUCTURED_REPLY.
    Structured,
    /// Negotiated by NBD_OPT_EXTENDED_HEADERS.
    Extended,
}

impl Replies {
    /// Returns the length of a request's header in bytes.
    pub const fn request_len(self) -> usize {
        match self {
            Replies::Extended => RequestHeader::EXTENDED_LEN,
            Replies::Simple | Replies::Structured => RequestHeader::COMPACT_LEN,
        }
    }

    /// Returns the name that proto.md uses.
    pub fn name(self) -> &'static str {
        match self {
            Replies::Simple => "simple replies",
            Replies::Structured => "structured replies",
            Replies::Extended => "extended headers",
        }
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`command_flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// Identifier that the client chooses; replies return it.
    pub cookie: u64,
    /// Start of the range, in bytes from the start of the export.
    pub offset: u64,
    /// Length in bytes of the range, or of the payload that follows. Compact headers have only 32
    /// bits of it.
    pub len: u64,
}

/// The number that was received instead of a request's magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:#010x} where a request should begin")]
pub struct NotARequest(pub u32);

impl RequestHeader {
    /// Length in bytes of a compact header.
    pub const COMPACT_LEN: usize = 28;
    /// Length in bytes of an extended header.
    pub const EXTENDED_LEN: usize = 32;

    /// Parses a header. `bytes` must have exactly [`Replies::request_len`] bytes.
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

    /// Returns the header for simple and structured replies.
    #[inline]
    pub fn compact(self) -> [u8; RequestHeader::COMPACT_LEN] {
        let mut bytes = [0; RequestHeader::COMPACT_LEN];
        bytes[..4].copy_from_slice(&COMPACT_REQUEST_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..24]);
        bytes[24..].copy_from_slice(&(self.len as u32).to_be_bytes());
        bytes
    }

    /// Returns the header for extended headers.
    #[inline]
    pub fn extended(self) -> [u8; RequestHeader::EXTENDED_LEN] {
        let mut bytes = [0; RequestHeader::EXTENDED_LEN];
        bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..24]);
        bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    #[inline]
    fn common(self, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&self.flags.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_be_bytes());
        bytes[4..12].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.offset.to_be_bytes());
    }

    /// Appends the header in the negotiated form.
    #[inline]
    pub fn put(self, replies: Replies, out: &mut Vec<u8>) {
        match replies {
            Replies::Extended => out.extend_from_slice(&self.extended()),
            Replies::Simple | Replies::Structured => out.extend_from_slice(&self.compact()),
        }
    }

    /// Returns whether a payload of `len` bytes follows the header.
    ///
    /// With extended headers, a write must set NBD_CMD_FLAG_PAYLOAD_LEN, but QEMU (up to 10.0 at
    /// least) does not set it.
    #[inline]
    pub fn has_payload(&self, replies: Replies) -> bool {
        let says_so = self.flags & command_flag::PAYLOAD_LEN != 0;
        self.command == command::WRITE || (replies == Replies::Extended && says_so)
    }
}

/// Returns the header of a simple reply; `error` is 0 or an [`ErrorCode`](super::ErrorCode).
#[inline]
pub fn simple_reply(error: u32, cookie: u64) -> [u8; ReplyHeader::SIMPLE_LEN] {
    let mut bytes = [0; ReplyHeader::SIMPLE_LEN];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The header of a chunk, which precedes its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// See [`REPLY_FLAG_DONE`](super::REPLY_FLAG_DONE).
    pub flags: u16,
    /// See [`chunk`](super::chunk).
    pub kind: u16,
    /// Identifier of the request to which the chunk belongs.
    pub cookie: u64,
    /// Offset of the request. Only extended headers contain it.
    pub offset: u64,
    /// Length of the payload in bytes. Structured headers have only 32 bits of it.
    pub len: u64,
}

impl ChunkHeader {
    /// Returns the header for structured replies, which omits the offset.
    #[inline]
    pub fn structured(self) -> [u8; ReplyHeader::STRUCTURED_LEN] {
        let mut bytes = [0; ReplyHeader::STRUCTURED_LEN];
        bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..16]);
        bytes[16..].copy_from_slice(&(self.len as u32).to_be_bytes());
        bytes
    }

    /// Returns the header for extended headers.
    #[inline]
    pub fn extended(self) -> [u8; ReplyHeader::EXTENDED_LEN] {
        let mut bytes = [0; ReplyHeader::EXTENDED_LEN];
        bytes[..4].copy_from_slice(&EXTENDED_REPLY_MAGIC.to_be_bytes());
        self.common(&mut bytes[4..16]);
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    #[inline]
    fn common(self, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&self.flags.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.kind.to_be_bytes());
        bytes[4..12].copy_from_slice(&self.cookie.to_be_bytes());
    }
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply.
    Simple {
        /// 0 if the request succeeded, otherwise an NBD error number.
        error: u32,
        /// Cookie of the request.
        cookie: u64,
    },
    /// The header of one chunk of a structured or extended reply.
    Chunk(ChunkHeader),
}

/// The number that was received instead of a reply's magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAReply(pub u32);

impl ReplyHeader {
    /// Length in bytes of the header of a simple reply.
    pub const SIMPLE_LEN: usize = 16;
    /// Length in bytes of the header of a structured chunk.
    pub const STRUCTURED_LEN: usize = 20;
    /// Length in bytes of the header of an extended chunk.
    pub const EXTENDED_LEN: usize = 32;

    /// Parses the header at the start of `bytes`, and returns it with its length.
    ///
    /// Returns `None` if `bytes` end before the header does.
    #[inline(always)]
    pub fn parse(
        replies: Replies,
        bytes: &[u8],
    ) -> Result<Option<(ReplyHeader, usize)>, NotAReply> {
        let Some(magic) = bytes.first_chunk() else {
            return Ok(None);
        };
        match (u32::from_be_bytes(*magic), replies) {
            (SIMPLE_REPLY_MAGIC, Replies::Simple | Replies::Structured) => {
                let bytes = bytes.first_chunk::<{ Self::SIMPLE_LEN }>();
                Ok(bytes.map(|bytes| (Self::simple(bytes), bytes.len())))
            }
            (STRUCTURED_REPLY_MAGIC, Replies::Structured) => {
                let bytes = bytes.first_chunk::<{ Self::STRUCTURED_LEN }>();
                Ok(bytes.map(|bytes| {
                    let len = u32_at(bytes, 16).into();
                    (Self::chunk(bytes, 0, len), bytes.len())
                }))
            }
            (EXTENDED_REPLY_MAGIC, Replies::Extended) => {
                let bytes = bytes.first_chunk::<{ Self::EXTENDED_LEN }>();
                Ok(bytes.map(|bytes| {
                    let (offset, len) = (u64_at(bytes, 16), u64_at(bytes, 24));
                    (Self::chunk(bytes, offset, len), bytes.len())
                }))
            }
            (magic, _) => Err(NotAReply(magic)),
        }
    }

    #[inline(always)]
    fn simple(bytes: &[u8]) -> ReplyHeader {
        ReplyHeader::Simple {
            error: u32_at(bytes, 4),
            cookie: u64_at(bytes, 8),
        }
    }

    #[inline(always)]
    fn chunk(bytes: &[u8], offset: u64, len: u64) -> ReplyHeader {
        ReplyHeader::Chunk(ChunkHeader {
            flags: u16_at(bytes, 4),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset,
            len,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the layout in proto.md, field by field.
    #[test]
    fn requests_are_those_of_the_specification() {
        let header = RequestHeader {
            flags: 0x0102,
            command: 0x0304,
            cookie: 0x0506_0708_090a_0b0c,
            offset: 0x0d0e_0f10_1112_1314,
            len: 0x1516_1718,
        };
        let fields: Vec<u8> = (1..=20).collect();
        let compact = [b"\x25\x60\x95\x13", &fields[..], b"\x15\x16\x17\x18"].concat();
        let len = b"\0\0\0\0\x15\x16\x17\x18";
        let extended = [b"\x21\xe4\x1c\x71", &fields[..], len].concat();
        for (replies, bytes, other) in [
            (Replies::Simple, &compact, &extended),
            (Replies::Structured, &compact, &extended),
            (Replies::Extended, &extended, &compact),
        ] {
            let mut put = Vec::new();
            header.put(replies, &mut put);
            assert_eq!(&put, bytes);
            assert_eq!(bytes.len(), replies.request_len());
            assert_eq!(RequestHeader::parse(replies, bytes), Ok(header));
            let magic = u32_at(other, 0);
            let parsed = RequestHeader::parse(replies, other);
            assert_eq!(parsed, Err(NotARequest(magic)));
        }
    }

    /// Clients parse the headers of each form that they have negotiated, and reject others, however
    /// many bytes follow.
    #[test]
    fn replies_are_read_as_they_are_written() {
        use Replies::{Extended, Simple, Structured};
        let header = |offset| ChunkHeader {
            flags: 1,
            kind: 0x8002,
            cookie: 0x0102_0304_0506_0708,
            offset,
            len: 0xffff_fffe,
        };
        let (simple, cookie) = (simple_reply(28, 7), 7);
        let simple = (&simple[..], ReplyHeader::Simple { error: 28, cookie });
        let structured = header(1 << 40).structured();
        let structured = (&structured[..], ReplyHeader::Chunk(header(0)));
        let extended = header(1 << 40).extended();
        let extended = (&extended[..], ReplyHeader::Chunk(header(1 << 40)));
        for (replies, good, bad) in [
            (Simple, vec![simple], vec![structured, extended]),
            (Structured, vec![simple, structured], vec![extended]),
            (Extended, vec![extended], vec![simple, structured]),
        ] {
            for (bytes, header) in good {
                let more = [bytes, b"and more"].concat();
                let parsed = ReplyHeader::parse(replies, &more);
                assert_eq!(parsed, Ok(Some((header, bytes.len()))));
                for len in 0..bytes.len() {
                    assert_eq!(ReplyHeader::parse(replies, &bytes[..len]), Ok(None));
                }
            }
            for (bytes, _) in bad {
                let magic = u32_at(bytes, 0);
                assert_eq!(ReplyHeader::parse(replies, bytes), Err(NotAReply(magic)));
            }
        }
    }
}
