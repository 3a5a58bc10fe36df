//! Queries a Fathom server for the changes of a disk that is being moved; `moving.rs` of the crate
//! `exports` is the other side.

use super::answers::Answers;
use super::endpoint::{Endpoint, Greeted};
use crate::kind::Halt;
use fathom_core::DiskError;
use fathom_core::changes::Run;
use fathom_nbd::NbdUri;
use fathom_nbd::client::Export;
use fathom_nbd::protocol::{
    CHANGED, CHANGES_BEGIN, CHANGES_GO_ON, REPLY_FLAG_DONE, Replies, ReplyHeader, RequestHeader,
    chunk, command, is_move_id, u32_at, u64_at,
};
use rustix::net::{Shutdown, shutdown};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout for connecting, and for each reply.
const PATIENCE: Duration = Duration::from_secs(10);

/// Granularity of the reported changes in bytes.
const BLOCK: u64 = 4096;

/// Lengths in bytes of one extent, and of the head before the first.
const EXTENT: usize = 16;
const HEAD: usize = 8;

/// The server's refusal, with its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// A connection for querying changes.
pub struct ChangesClient {
    endpoint: Endpoint,
    greeted: Greeted,
    export: Export,
    cookie: u64,
}

impl ChangesClient {
    /// Connects; blocking. If `begins`, earlier changes do not matter; otherwise the server must
    /// know the move named `id`. The error is one line for the user.
    pub fn connect(uri: &NbdUri, id: &str, begins: bool) -> Result<ChangesClient, DiskError> {
        debug_assert!(is_move_id(id));
        let context = if begins { CHANGES_BEGIN } else { CHANGES_GO_ON };
        let endpoint = Endpoint::new(uri, format!("{context}{id}"), PATIENCE)?;
        let (greeted, export) = endpoint.connect()?;
        if export.replies != Replies::Extended {
            return Err(endpoint.unusable("the server does not support extended headers"));
        }
        Ok(ChangesClient {
            endpoint,
            greeted,
            export,
            cookie: 0,
        })
    }

    /// Returns the disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.export.size
    }

    /// Returns a function that closes the connection, even while a reply is awaited.
    pub fn halt(&self) -> Halt {
        let socket = Arc::downgrade(&self.greeted.socket);
        Arc::new(move || {
            let socket = socket.upgrade();
            // The connection may be closed already.
            let _ = socket.map(|socket| shutdown(&socket, Shutdown::Both));
        })
    }

    /// Returns the changes since the last query, from `offset` on. `offset` is the end of the last
    /// answer, or 0. The answer covers at least one byte and at most `len`. After an error the
    /// server may have reported the range although the reply was lost.
    pub fn next(&mut self, offset: u64, len: u64) -> Result<Vec<Run>, DiskError> {
        let payload = self.ask(command::BLOCK_STATUS, offset, len)?;
        let payload = payload.map_err(|refused| self.endpoint.unusable(refused.0))?;
        let nonsense = || {
            self.endpoint
                .unusable("the server sent inconsistent extents")
        };
        let extents = payload.get(HEAD..).ok_or_else(nonsense)?;
        let extents = extents.chunks_exact(EXTENT).map(|extent| Run {
            len: u64_at(extent, 0),
            changed: u64_at(extent, 8) & u64::from(CHANGED) != 0,
        });
        let extents: Vec<_> = extents.collect();
        let told = extents
            .iter()
            .try_fold(0u64, |sum, extent| sum.checked_add(extent.len));
        // Answers must end on block boundaries: a server that reports less at a time would make the
        // query endless.
        let is_block = |told: u64| told.is_multiple_of(BLOCK) || told == len;
        let fits = told.is_some_and(|told| (1..=len).contains(&told) && is_block(told));
        match fits && extents.iter().all(|extent| extent.len > 0) {
            true => Ok(extents),
            false => Err(nonsense()),
        }
    }

    /// Takes the disk over: no guest of the server may use it any more. The disk may have been
    /// taken over even if no reply arrives.
    pub fn take_over(&mut self) -> Result<Result<(), Refused>, DiskError> {
        let answer = self.ask(command::TAKE_OVER, 0, 0)?;
        Ok(answer.map(drop))
    }

    /// Sends a command and returns the payload of the reply, if it has one.
    fn ask(
        &mut self,
        command: u16,
        offset: u64,
        len: u64,
    ) -> Result<Result<Vec<u8>, Refused>, DiskError> {
        self.cookie += 1;
        self.asked(command, offset, len)
            .map_err(|source| DiskError::Io {
                path: self.endpoint.name(),
                what: "cannot read which blocks have changed",
                source,
            })
    }

    fn asked(
        &mut self,
        command: u16,
        offset: u64,
        len: u64,
    ) -> io::Result<Result<Vec<u8>, Refused>> {
        let transport = &mut self.greeted.transport;
        transport.set_deadline(Instant::now() + PATIENCE);
        let header = RequestHeader {
            flags: 0,
            command,
            cookie: self.cookie,
            offset,
            len,
        };
        let mut out = Vec::new();
        header.put(self.export.replies, &mut out);
        transport.write_all(&out)?;
        let mut answers = Answers::new(transport, self.export.replies);
        let mut payload = Vec::new();
        loop {
            let header = match answers.header()? {
                ReplyHeader::Chunk(header) if header.cookie == self.cookie => header,
                _ => {
                    return Err(io::Error::other(
                        "the server sent a reply to another request",
                    ));
                }
            };
            let bytes = answers.payload(header)?;
            if header.kind & chunk::ERROR_BIT != 0 {
                return Ok(Err(Refused(text_of(&bytes))));
            }
            if header.kind == chunk::BLOCK_STATUS_EXT {
                payload = bytes;
            }
            if header.flags & REPLY_FLAG_DONE != 0 {
                return Ok(Ok(payload));
            }
        }
    }
}

/// Returns the text of an error chunk.
fn text_of(bytes: &[u8]) -> String {
    let text = bytes.get(6..).unwrap_or_default();
    match fathom_nbd::protocol::readable(text) {
        text if text.is_empty() => format!("the server failed ({})", u32_at(bytes, 0)),
        text => format!("the server refused: {text}"),
    }
}
