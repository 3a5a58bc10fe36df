//! One connection in the transmission phase: a source of its disk's requests.

use super::wire::{MAX_PAYLOAD, Replies, export_flag};
use fathom_core::{Broken, Cx, DiskInfo, RangeLimits, Request, RequestId, Source, SourceId};
use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

/// A connection whose handshake is over.
pub struct Stream {
    /// Connected; set to non-blocking by [`NbdSource::new`].
    pub socket: OwnedFd,
    /// Its handshake is over, too, and nothing waits to be written.
    pub tls: Option<Box<rustls::ServerConnection>>,
    /// What was received behind the handshake (with TLS: as plain text).
    pub read_ahead: Vec<u8>,
}

/// What the handshake has agreed upon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    pub replies: Replies,
    /// The id of base:allocation, if the client has asked for it.
    pub allocation_context: Option<u32>,
}

/// The disk as this connection's client sees it, from beginning to end: a
/// later resize is for later connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportView {
    /// For the log.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// What offsets and lengths must be multiples of, a power of two of 512
    /// at least.
    pub minimum_block: u32,
    /// What they had better be multiples of.
    pub preferred_block: u32,
    pub read_only: bool,
    /// A write is volatile until a flush, unless it says otherwise.
    pub write_cache: bool,
    pub discard: Option<RangeLimits>,
    pub write_zeroes: Option<RangeLimits>,
}

impl ExportView {
    pub fn new(name: &str, info: &DiskInfo) -> ExportView {
        ExportView {
            name: name.to_owned(),
            size: info.size,
            minimum_block: info.block_size.max(512),
            preferred_block: info.physical_block_size.max(4096),
            read_only: info.read_only,
            write_cache: info.write_cache,
            discard: info.discard,
            write_zeroes: info.write_zeroes,
        }
    }

    /// The transmission flags to send to a client that has agreed on
    /// `replies`. What they do not offer is refused.
    pub fn flags(&self, replies: Replies) -> u16 {
        use export_flag::*;
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        let mut add = |when: bool, what: u16| flags |= if when { what } else { 0 };
        add(self.read_only, READ_ONLY);
        add(!self.read_only && self.discard.is_some(), SEND_TRIM);
        let zeroes = !self.read_only && self.write_zeroes.is_some();
        add(zeroes, SEND_WRITE_ZEROES | SEND_FAST_ZERO);
        add(replies != Replies::Simple, SEND_DF);
        add(replies == Replies::Extended, BLOCK_STATUS_PAYLOAD);
        flags
    }
}

/// What one connection may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in flight, 1 to 4096; the client's further ones wait in the
    /// socket.
    pub requests: usize,
    /// Bytes of data, [`Limits::MIN_MEMORY`] at least.
    pub memory: usize,
}

impl Limits {
    /// The payload of a write, and of a read that is answered in one piece
    /// (NBD_INFO_BLOCK_SIZE).
    pub const MAX_PAYLOAD: u32 = MAX_PAYLOAD;

    /// One of the largest reads, and something beside it.
    pub const MIN_MEMORY: usize = MAX_PAYLOAD as usize + (8 << 20);
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            requests: 256,
            memory: 64 << 20,
        }
    }
}

/// Called on the worker's thread, once, when a connection has ended and
/// nothing of it is in flight: it is time to detach it. Must not block.
pub type OnEnd = Box<dyn FnOnce() + Send>;

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It has not: it was detached.
    Detached,
    /// By NBD_CMD_DISC.
    Disconnected,
    /// The client closed it without saying so, with so many requests not
    /// answered.
    Vanished { unanswered: usize },
    /// The client sent what cannot be followed, or the socket failed.
    Failed(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Detached => f.write_str("closed by the server"),
            Ending::Disconnected => f.write_str("disconnected"),
            Ending::Vanished { unanswered: 0 } => f.write_str("closed by the client"),
            Ending::Vanished { unanswered } => {
                write!(
                    f,
                    "closed by the client with {unanswered} requests in flight"
                )
            }
            Ending::Failed(why) => f.write_str(why),
        }
    }
}

/// A connection in the transmission phase.
pub struct NbdSource {
    ending: Ending,
}

impl NbdSource {
    /// Serve a connection. `number` tells its requests from others' in
    /// traces.
    pub fn new(
        _stream: Stream,
        _export: &ExportView,
        _agreed: Agreed,
        _limits: Limits,
        _number: u16,
        _on_end: OnEnd,
    ) -> io::Result<NbdSource> {
        todo!()
    }

    /// Why it ended, once it is detached: the server's one line of log.
    pub fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        todo!()
    }
}

impl Source for NbdSource {
    fn capacity(&self) -> usize {
        todo!()
    }

    fn kick_fd(&self) -> Option<RawFd> {
        None
    }

    fn start(&mut self, _cx: &mut Cx, _id: SourceId) -> io::Result<()> {
        todo!()
    }

    fn pending(&mut self) -> bool {
        todo!()
    }

    fn pop(&mut self, _: &mut Cx, _: usize, _: &mut Vec<RequestId>) -> Result<u32, Broken> {
        todo!()
    }

    fn finish(&mut self, _request: &Request) {
        todo!()
    }

    fn publish(&mut self, _cx: &mut Cx) -> bool {
        todo!()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
