//! Receives and checks a server's replies.
//!
//! Bytes arrive in a small inbox. The data of a read goes directly into its request's segments once
//! its header has been seen.

use super::rules::{
    Context, SHUTS_DOWN, Tells, Violation, bounded, cover, cover_at, describe, end, error_of,
    extent_size, head_of,
};
use super::segments::gather;
use super::table::Table;
use fathom_core::segments::{clear, write_at};
use fathom_core::{Extents, RequestId, Slab};
use fathom_nbd::protocol::{
    ChunkHeader, ErrorCode, NotAReply, REPLY_FLAG_DONE, Replies, ReplyHeader, chunk, command,
    errno, u32_at, u64_at,
};
use libc::{iovec, msghdr};

/// Size of the inbox in bytes: room for many small replies, and for the longest error.
const INBOX: usize = 64 << 10;

/// Average length in bytes of awaited replies from which on only a header is received into the
/// inbox, so that the data need not be copied.
const LARGE: u64 = 8 << 10;

/// Maximum number of iovecs of one receive: those of the data, and the inbox.
const MAX_IOVECS: usize = 1024;

/// Kind of a reply's remaining payload.
enum Payload {
    Data {
        /// Offset in the request's segments of the next byte.
        at: u64,
    },
    Status(Extents, Tells),
}

/// A reply that has been received partly.
struct Open {
    index: u16,
    id: RequestId,
    payload: Payload,
    /// Number of missing bytes.
    left: u32,
    /// Whether this is the last chunk of the reply.
    last: bool,
}

pub(super) struct Receiver {
    inbox: Box<[u8]>,
    start: usize,
    end: usize,
    open: Option<Open>,
    replies: Replies,
    context: Option<Context>,
    iovecs: Vec<iovec>,
    /// Boxed, because the engine uses its address.
    message: Box<msghdr>,
    /// Number of bytes of the receive in flight that go directly to the open reply.
    direct: usize,
}

impl Receiver {
    /// Makes the receiver of a connection with these negotiated properties.
    pub(super) fn new(replies: Replies, context: Option<Context>) -> Receiver {
        Receiver {
            inbox: vec![0; INBOX].into(),
            start: 0,
            end: 0,
            open: None,
            replies,
            context,
            iovecs: Vec::with_capacity(MAX_IOVECS),
            // SAFETY: an all-zero header is a message without data.
            message: Box::new(unsafe { std::mem::zeroed() }),
            direct: 0,
        }
    }

    /// Returns the message of the next receive: the rest of an open reply's data, then the inbox
    /// for what follows.
    pub(super) fn prepare(&mut self, table: &Table, slab: &Slab) -> *mut msghdr {
        self.iovecs.clear();
        self.direct = 0;
        if let Some(Open {
            id,
            payload: Payload::Data { at },
            left,
            ..
        }) = self.open
        {
            let (segments, limit) = (&slab[id].segments, MAX_IOVECS - 1);
            let len = gather(segments, at, left.into(), limit, &mut self.iovecs);
            self.direct = len as usize;
        }
        let covers = self
            .open
            .as_ref()
            .is_none_or(|open| open.left as usize == self.direct);
        if covers || self.direct == 0 {
            let head = match self.replies {
                Replies::Simple => ReplyHeader::SIMPLE_LEN,
                Replies::Structured => ReplyHeader::STRUCTURED_LEN + 8,
                Replies::Extended => ReplyHeader::EXTENDED_LEN + 8,
            };
            let is_large = table.awaited() >= LARGE;
            let mut room = self.room();
            if is_large && INBOX - room.len() < head {
                let have = INBOX - room.len();
                room = &mut room[..head - have];
            }
            let room = iovec {
                iov_base: room.as_mut_ptr().cast(),
                iov_len: room.len(),
            };
            self.iovecs.push(room);
        }
        self.message.msg_iov = self.iovecs.as_mut_ptr();
        self.message.msg_iovlen = self.iovecs.len() as _;
        &mut *self.message
    }

    /// Returns the free part of the inbox.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.inbox.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.inbox[self.end..]
    }

    /// Records that `bytes` have arrived in the message of `prepare`.
    pub(super) fn received(&mut self, bytes: usize) {
        let direct = bytes.min(self.direct);
        if let Some(open) = &mut self.open
            && let Payload::Data { at } = &mut open.payload
        {
            open.left -= direct as u32;
            *at += direct as u64;
        }
        self.end += bytes - direct;
    }

    /// Processes the received bytes. Commands whose replies are complete are appended to
    /// `answered`.
    pub(super) fn take_in(
        &mut self,
        table: &mut Table,
        slab: &Slab,
        now: u64,
        answered: &mut Vec<u16>,
    ) -> Result<(), Violation> {
        loop {
            let more = match self.open.take() {
                Some(open) => {
                    table.get(open.index).touched = now;
                    self.go_on(open, table, slab, answered)?
                }
                None => self.begin(table, slab, now, answered)?,
            };
            if !more {
                return Ok(());
            }
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.inbox[self.start..self.end]
    }

    /// Continues an open reply. Returns false if it needs more bytes.
    fn go_on(
        &mut self,
        mut open: Open,
        table: &mut Table,
        slab: &Slab,
        answered: &mut Vec<u16>,
    ) -> Result<bool, Violation> {
        match &mut open.payload {
            Payload::Data { at } => {
                let here = self.bytes();
                let here = &here[..here.len().min(open.left as usize)];
                // SAFETY: the command awaits a reply, so its request is in flight; the inbox is not
                // part of the request's memory.
                unsafe { write_at(&slab[open.id].segments, *at, here) };
                let len = here.len();
                self.start += len;
                open.left -= len as u32;
                *at += len as u64;
            }
            Payload::Status(extents, tells) => {
                let is_extended = self.replies == Replies::Extended;
                let size = extent_size(is_extended);
                while open.left > 0 && self.bytes().len() >= size {
                    describe(extents, *tells, self.bytes(), is_extended)?;
                    self.start += size;
                    open.left -= size as u32;
                }
            }
        }
        if open.left > 0 {
            self.open = Some(open);
            return Ok(false);
        }
        if open.last {
            end(table, open.index, answered)?;
        }
        Ok(true)
    }

    /// Begins the next reply, or the next chunk of a reply. Returns false if it needs more bytes.
    #[inline]
    fn begin(
        &mut self,
        table: &mut Table,
        slab: &Slab,
        now: u64,
        answered: &mut Vec<u16>,
    ) -> Result<bool, Violation> {
        let header = ReplyHeader::parse(self.replies, self.bytes())
            .map_err(|NotAReply(magic)| format!("sent {magic:#010x} instead of a reply"))?;
        let Some((header, len)) = header else {
            return Ok(false);
        };
        let (ReplyHeader::Simple { cookie, .. } | ReplyHeader::Chunk(ChunkHeader { cookie, .. })) =
            header;
        let Some(index) = table.find(cookie) else {
            return Err(format!(
                "replied to a request that was not sent (cookie {cookie:#x})"
            ));
        };
        table.get(index).touched = now;
        match header {
            ReplyHeader::Simple { error, .. } => {
                self.start += len;
                self.simple(index, error, table, answered)
            }
            ReplyHeader::Chunk(header) => self.chunk(index, header, len, table, slab, answered),
        }
    }

    fn simple(
        &mut self,
        index: u16,
        error: u32,
        table: &mut Table,
        answered: &mut Vec<u16>,
    ) -> Result<bool, Violation> {
        let entry = table.get(index);
        let (ask, has_data) = (entry.ask, entry.ask.command == command::READ);
        if error == ErrorCode::Shutdown as u32 {
            return Err(SHUTS_DOWN.into());
        } else if error != 0 {
            entry.errno = errno(error);
        } else if self.replies != Replies::Simple && has_data
            || ask.command == command::BLOCK_STATUS
        {
            return Err("sent a reply without data to a read".into());
        } else if has_data {
            let len = ask.read_len();
            cover(entry, 0, len)?;
            self.open = Some(Open {
                index,
                id: ask.id,
                payload: Payload::Data { at: ask.start },
                left: len,
                last: true,
            });
            return Ok(true);
        }
        end(table, index, answered)?;
        Ok(true)
    }

    fn chunk(
        &mut self,
        index: u16,
        header: ChunkHeader,
        header_len: usize,
        table: &mut Table,
        slab: &Slab,
        answered: &mut Vec<u16>,
    ) -> Result<bool, Violation> {
        let bytes = self.bytes();
        let last = header.flags & REPLY_FLAG_DONE != 0;
        let is_extended = self.replies == Replies::Extended;
        let entry = table.get(index);
        let ask = entry.ask;
        if is_extended && header.offset != ask.offset {
            return Err("sent a reply with another request's offset".into());
        }
        let (kind, len) = (header.kind, bounded(header.len)?);
        let head = head_of(kind, len, last, ask.command, is_extended)?;
        let Some(head) = bytes[header_len..].get(..head) else {
            return Ok(false);
        };
        let open = |payload, left| {
            Some(Open {
                index,
                id: ask.id,
                payload,
                left,
                last,
            })
        };
        let left = len - head.len() as u32;
        let opened = match kind {
            chunk::OFFSET_DATA => {
                let start = cover_at(entry, u64_at(head, 0), left)?;
                let at = ask.start + u64::from(start);
                open(Payload::Data { at }, left)
            }
            chunk::OFFSET_HOLE => {
                let len = u32_at(head, 8);
                let start = cover_at(entry, u64_at(head, 0), len)?;
                let at = ask.start + u64::from(start);
                // SAFETY: the command awaits a reply, so its request is in flight.
                unsafe { clear(&slab[ask.id].segments, at..at + u64::from(len)) };
                None
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                let context = self.context.filter(|own| own.id == u32_at(head, 0));
                let Some(Context { tells, .. }) = context else {
                    return Err("sent a metadata context that was not requested".into());
                };
                let size = extent_size(is_extended);
                if is_extended && u64::from(u32_at(head, 4)) * size as u64 != u64::from(left) {
                    return Err("sent fewer or more extents than it announced".into());
                }
                // A reply may have only one block status chunk.
                cover(entry, 0, 1)?;
                let request = &slab[ask.id];
                // SAFETY: the command awaits a reply, so its request is in flight.
                let extents = unsafe { Extents::of(&request.segments, request.len) };
                open(Payload::Status(extents, tells), left)
            }
            chunk::NONE => None,
            _ => {
                entry.errno = error_of(kind, head)?;
                None
            }
        };
        self.start += header_len + head.len();
        self.open = opened;
        if self.open.is_none() && last {
            end(table, index, answered)?;
        }
        Ok(true)
    }
}
