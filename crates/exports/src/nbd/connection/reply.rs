//! Encodes replies into the outbox.

use super::outbox::Outbox;
use super::pool::Span;
use super::table::Failure;
use fathom_nbd::protocol::{ChunkHeader, ErrorCode, REPLY_FLAG_DONE, Replies, chunk, simple_reply};

/// The command that a reply belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub cookie: u64,
    /// Offset of the request.
    pub offset: u64,
}

/// Writes replies in the negotiated format.
pub(super) struct Reply<'a> {
    pub outbox: &'a mut Outbox,
    pub replies: Replies,
}

/// Data of a chunk, at the start of a span.
pub(super) struct Data {
    pub at: *mut u8,
    pub len: usize,
    pub span: Span,
}

impl Reply<'_> {
    /// Writes a chunk's header and the part of its payload that is not data.
    #[inline]
    fn chunk(&mut self, to: To, kind: u16, done: bool, payload: &[u8], data: usize) {
        let header = ChunkHeader {
            flags: if done { REPLY_FLAG_DONE } else { 0 },
            kind,
            cookie: to.cookie,
            offset: to.offset,
            len: (payload.len() + data) as u64,
        };
        match self.replies {
            Replies::Extended => self.outbox.bytes(&header.extended()),
            _ => self.outbox.bytes(&header.structured()),
        }
        if !payload.is_empty() {
            self.outbox.bytes(payload);
        }
    }

    /// Replies with success, without data.
    #[inline]
    pub(super) fn done(&mut self, to: To) {
        match self.replies {
            Replies::Extended => self.chunk(to, chunk::NONE, true, &[], 0),
            _ => self.outbox.bytes(&simple_reply(0, to.cookie)),
        }
    }

    /// Replies to a read of 0 bytes. With structured replies, a read must not get a simple reply.
    pub(super) fn nothing(&mut self, to: To) {
        match self.replies {
            Replies::Simple => self.outbox.bytes(&simple_reply(0, to.cookie)),
            _ => self.chunk(to, chunk::NONE, true, &[], 0),
        }
    }

    /// Replies with an error that `text` explains.
    #[cold]
    pub(super) fn error(&mut self, to: To, code: ErrorCode, text: &str) {
        if self.replies == Replies::Simple {
            return self.outbox.bytes(&simple_reply(code as u32, to.cookie));
        }
        self.chunk(to, chunk::ERROR, true, &error_payload(code, text), 0);
    }

    /// Replies with an error of the disk and its offset.
    #[cold]
    pub(super) fn failure(&mut self, to: To, failure: Failure, what: &str) {
        let Failure { code, offset } = failure;
        let text = format!("{what} at offset {offset} failed: {}", code.text());
        if self.replies == Replies::Simple {
            return self.error(to, code, &text);
        }
        let mut payload = error_payload(code, &text);
        payload.extend(offset.to_be_bytes());
        self.chunk(to, chunk::ERROR_OFFSET, true, &payload, 0);
    }

    /// Sends data that was read at `offset`. With simple replies, the data is the whole read.
    #[inline]
    pub(super) fn data(&mut self, to: To, offset: u64, data: Data, done: bool) {
        match self.replies {
            Replies::Simple => self.outbox.bytes(&simple_reply(0, to.cookie)),
            _ => {
                let payload = offset.to_be_bytes();
                self.chunk(to, chunk::OFFSET_DATA, done, &payload, data.len);
            }
        }
        self.more(data);
    }

    /// Writes the header of data that follows in several parts.
    pub(super) fn begin_data(&mut self, to: To, len: usize) {
        match self.replies {
            Replies::Simple => self.outbox.bytes(&simple_reply(0, to.cookie)),
            _ => {
                let payload = to.offset.to_be_bytes();
                self.chunk(to, chunk::OFFSET_DATA, true, &payload, len);
            }
        }
    }

    /// Sends a part of the data that [`Reply::begin_data`] announced.
    #[inline]
    pub(super) fn more(&mut self, data: Data) {
        self.outbox.data(data.at, data.len, data.span);
    }

    /// Sends a hole: zeroes were read at `offset`.
    pub(super) fn hole(&mut self, to: To, offset: u64, len: u32, done: bool) {
        let mut payload = [0; 12];
        payload[..8].copy_from_slice(&offset.to_be_bytes());
        payload[8..].copy_from_slice(&len.to_be_bytes());
        self.chunk(to, chunk::OFFSET_HOLE, done, &payload, 0);
    }

    /// Sends the extents of a context.
    pub(super) fn extents(
        &mut self,
        to: To,
        context: u32,
        extents: impl Iterator<Item = (u32, u64)>,
        done: bool,
    ) {
        let wide = self.replies == Replies::Extended;
        let mut payload = context.to_be_bytes().to_vec();
        if wide {
            payload.extend([0; 4]);
        }
        let mut count = 0u32;
        for (flags, len) in extents {
            if wide {
                payload.extend(len.to_be_bytes());
                payload.extend(u64::from(flags).to_be_bytes());
            } else {
                payload.extend((len as u32).to_be_bytes());
                payload.extend(flags.to_be_bytes());
            }
            count += 1;
        }
        if wide {
            payload[4..8].copy_from_slice(&count.to_be_bytes());
        }
        let kind = if wide {
            chunk::BLOCK_STATUS_EXT
        } else {
            chunk::BLOCK_STATUS
        };
        self.chunk(to, kind, done, &payload, 0);
    }
}

/// Encodes the payload of an error chunk, up to the end of its text.
fn error_payload(code: ErrorCode, text: &str) -> Vec<u8> {
    let mut payload = (code as u32).to_be_bytes().to_vec();
    payload.extend((text.len() as u16).to_be_bytes());
    payload.extend(text.as_bytes());
    payload
}
