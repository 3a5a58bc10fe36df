//! Parses vhost-user messages, bytes and file descriptors, into typed requests.
//!
//! QEMU's docs/interop/vhost-user.rst, "Message Specification", defines the format. A message is a
//! header of three 32-bit words in native byte order, and a payload; file descriptors accompany the
//! header as SCM_RIGHTS. The peer is not trusted: sizes and counts are checked before anything is
//! read or stored, and no sequence of bytes causes a panic.

mod message;
mod socket;

pub use message::{ConfigRange, Inflight, Region, Request, VringAddr, has_reply, name};
pub use socket::{Received, Receiver, send};

use fathom_units::cause;
use std::io;
use std::os::fd::OwnedFd;

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 12;
/// Maximum payload in bytes that is accepted or sent. The longest one in use is a configuration
/// space.
pub const MAX_PAYLOAD: usize = 4096;
/// Maximum number of file descriptors in one message; a memory table needs the most.
pub const MAX_FDS: usize = 32;

const VERSION: u32 = 0x1;
const VERSION_MASK: u32 = 0x3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The first 12 bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub request: u32,
    pub flags: u32,
    /// Number of payload bytes that follow.
    pub size: u32,
}

impl Header {
    /// Creates the header of a request from this side.
    pub fn request(request: u32, size: usize, need_reply: bool) -> Header {
        Header {
            request,
            flags: VERSION | if need_reply { NEED_REPLY } else { 0 },
            size: size as u32,
        }
    }

    /// Creates the header of the reply to `request`.
    pub fn reply(request: u32, size: usize) -> Header {
        Header {
            request,
            flags: VERSION | REPLY,
            size: size as u32,
        }
    }

    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    pub fn is_reply(&self) -> bool {
        self.flags & REPLY != 0
    }

    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&self.request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.size.to_ne_bytes());
        bytes
    }

    /// Parses a header and checks its version and its size.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Header, CodecError> {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let header = Header {
            request: word(0),
            flags: word(4),
            size: word(8),
        };
        if header.flags & VERSION_MASK != VERSION {
            return Err(CodecError::Version(header.flags & VERSION_MASK));
        }
        if header.size as usize > MAX_PAYLOAD {
            return Err(CodecError::TooLong(header.size));
        }
        Ok(header)
    }
}

/// A whole message as received.
#[derive(Debug)]
pub struct Frame {
    pub header: Header,
    /// Payload of `header.size` bytes.
    pub payload: Vec<u8>,
    /// At most [`MAX_FDS`] file descriptors, all close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Error of the byte stream; the connection must be closed.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    #[error("message of protocol version {0}, expected 1")]
    Version(u32),
    #[error("payload of {0} bytes exceeds the limit of {MAX_PAYLOAD}")]
    TooLong(u32),
    #[error("message with more than {MAX_FDS} file descriptors")]
    TooManyFds,
    #[error("message longer than its header says")]
    Surplus,
    #[error("the connection was closed within a message")]
    Truncated,
    #[error("the front-end does not read its replies")]
    Unread,
    #[error("{}", cause(.0))]
    Io(#[from] io::Error),
}
