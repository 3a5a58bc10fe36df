//! An NBD connection in the transmission phase: a source of requests to its disk.
//!
//! - `life` receives into the `inbox`, or into a large payload's own pages, and ends the
//!   connection.
//! - `intake` turns received commands into requests, after `check` has validated them.
//! - `answer` turns completed requests into replies.
//! - `outbox` sends the replies.
//! - `mover` tells a server that takes over the disk which blocks change.
//! - `state` pauses a connection and hands it over to another process.
//!
//! All data memory comes from the connection's own `pool`. If the pool or the free requests run
//! out, or the client does not read its replies, the connection stops receiving and the client
//! waits.
//!
//! # Commands
//!
//! - A single receive accepts all commands that the socket holds. The payload of a small write is
//!   used where it was received. A large payload is received into pages of its own, which suit
//!   O_DIRECT.
//! - A long command becomes several requests of 256 KiB, so that other commands can overtake it.
//! - After NBD_CMD_DISC, every command gets its reply before the socket closes. If the client
//!   vanishes, its requests complete, and the source leaves its worker when the kernel no longer
//!   uses its memory.

mod answer;
mod check;
#[cfg(feature = "testing")]
pub mod fuzz;
mod inbox;
mod intake;
mod life;
mod mover;
mod outbox;
mod pool;
mod reply;
mod state;
mod table;

use super::moving::Mover;
use fathom_core::{Broken, Cx, DiskInfo, RangeLimits, Request, RequestId, Source, SourceId};
use fathom_nbd::protocol::{MAX_PAYLOAD, Replies, export_flag};
use fathom_tls::Session;
use inbox::Inbox;
use intake::{Intake, Payload, Stop};
use life::Receive;
use outbox::Outbox;
use pool::{Pool, Span};
use rustix::net::{AddressFamily, sockopt};
pub use state::{Described, SourceState};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use table::Table;

/// A connection that has completed its handshake.
pub struct Stream {
    /// The connected socket.
    pub socket: OwnedFd,
    /// The TLS session, whose handshake is complete and which has no bytes to write.
    pub tls: Option<Box<rustls::Connection>>,
    /// Bytes received after the handshake; with TLS, their plain text.
    pub read_ahead: Vec<u8>,
}

/// Result of the handshake's negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Kind of the headers of requests and replies.
    pub replies: Replies,
    /// Id of `base:allocation`, if the client has selected it.
    pub allocation_context: Option<u32>,
    /// Id of the context of the export's dirty bitmap, if the client has selected it.
    pub bitmap_context: Option<u32>,
}

/// The disk as this connection's client sees it. The view stays the same until the end; only later
/// connections see a resize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportView {
    /// Name of the export, for the log.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Minimum block size in bytes that is announced to clients. The server accepts any offset and
    /// length, since clients need not ask for block sizes.
    pub minimum_block: u32,
    /// Preferred block size in bytes.
    pub preferred_block: u32,
    /// Whether commands that change the disk are rejected.
    pub read_only: bool,
    /// Writes are volatile until a flush, unless they carry FUA.
    pub write_cache: bool,
    /// Limits of NBD_CMD_TRIM. `None`: the disk does not support the command.
    pub discard: Option<RangeLimits>,
    /// Limits of NBD_CMD_WRITE_ZEROES. `None`: the disk does not support the command.
    pub write_zeroes: Option<RangeLimits>,
}

impl ExportView {
    /// Returns the view of a disk with these properties. `name` is the name of the export.
    pub fn new(name: &str, info: &DiskInfo) -> ExportView {
        ExportView {
            name: name.to_owned(),
            size: info.size,
            // A write of part of a sector is cheap here. A write of part of a larger block is not,
            // and the client may know the rest of the block.
            minimum_block: match info.block_size {
                0..=512 => 1,
                large => large,
            },
            preferred_block: info.physical_block_size.max(4096),
            read_only: info.read_only,
            write_cache: info.write_cache,
            discard: info.discard,
            write_zeroes: info.write_zeroes,
        }
    }

    /// Returns the transmission flags for a client that has negotiated `replies`. Commands that the
    /// flags do not offer are refused.
    pub fn flags(&self, replies: Replies) -> u16 {
        use export_flag::*;
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        let mut add = |when: bool, what: u16| flags |= if when { what } else { 0 };
        add(self.read_only, READ_ONLY);
        add(!self.read_only && self.discard.is_some(), SEND_TRIM);
        let zeroes = !self.read_only && self.write_zeroes.is_some();
        add(zeroes, SEND_WRITE_ZEROES);
        add(replies != Replies::Simple, SEND_DF);
        add(replies == Replies::Extended, BLOCK_STATUS_PAYLOAD);
        flags
    }
}

/// Id of the metadata contexts that report changes.
pub const CHANGES_ID: u32 = 2;

/// Limits of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of requests in flight, 1 to 4096. Further requests of the client wait in the
    /// socket.
    pub requests: usize,
    /// Bytes of data memory, at least [`Limits::MIN_MEMORY`].
    pub memory: usize,
}

impl Limits {
    /// Maximum payload in bytes of a write, and of a read that is answered in one chunk
    /// (NBD_INFO_BLOCK_SIZE).
    pub const MAX_PAYLOAD: u32 = MAX_PAYLOAD;

    /// Minimum data memory in bytes: one read of the maximum length, and some other requests.
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

/// Callback for the end of a connection. The worker's thread calls it once, when nothing is in
/// flight and the source can be detached. The callback must not block.
pub type OnEnd = Box<dyn FnOnce() + Send>;

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The server detached the connection.
    Detached,
    /// The client sent NBD_CMD_DISC.
    Disconnected,
    /// The client closed the socket without NBD_CMD_DISC, with this number of unanswered requests.
    Vanished {
        /// Number of requests without a reply.
        unanswered: usize,
    },
    /// The client violated the protocol, or the socket failed.
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

/// Activity of a connection, readable by other threads.
#[derive(Debug, Default)]
pub struct Activity {
    word: AtomicU64,
    hold: AtomicBool,
}

impl Activity {
    #[inline]
    fn set(&self, answered: u64, busy: bool) {
        let word = answered << 1 | u64::from(busy);
        self.word.store(word, Ordering::Relaxed);
    }

    /// Sets whether the connection is held when it is detached: see [`NbdSource::is_held`].
    pub fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::Relaxed);
    }

    /// Returns the number of commands answered, or None while commands are being executed. An equal
    /// number later means that there was no command in between.
    pub fn idle_after(&self) -> Option<u64> {
        let word = self.word.load(Ordering::Relaxed);
        (word & 1 == 0).then_some(word >> 1)
    }
}

/// Tags of the connection's socket operations.
const RECEIVE: u8 = 0;
const SEND: u8 = 1;

/// Send buffer of a Unix socket in bytes. The kernel lowers it to net.core.wmem_max.
const SEND_BUFFER: usize = 1 << 20;

/// Memory of a request, encoded in the request's cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Nothing,
    Pages(Span),
    /// Bytes in this block of the inbox.
    InPlace(usize),
}

const IN_PLACE: u64 = 1 << 63;

impl Held {
    #[inline]
    fn to_u64(self) -> u64 {
        match self {
            Held::Nothing => u64::MAX,
            Held::Pages(span) => span.to_u64(),
            Held::InPlace(block) => IN_PLACE | block as u64,
        }
    }

    #[inline]
    fn from_u64(cookie: u64) -> Held {
        match cookie {
            u64::MAX => Held::Nothing,
            _ if cookie & IN_PLACE != 0 => Held::InPlace((cookie & !IN_PLACE) as usize),
            _ => Held::Pages(Span::from_u64(cookie)),
        }
    }
}

/// A connection in the transmission phase.
pub struct NbdSource {
    export: ExportView,
    agreed: Agreed,
    /// Set if the client takes over the disk and asks which blocks change.
    mover: Option<Mover>,
    number: u16,
    socket: OwnedFd,
    tls: Option<Session>,
    /// The source's id while it is attached.
    id: Option<SourceId>,
    receive: Box<Receive>,
    inbox: Inbox,
    payload: Option<Payload>,
    table: Table,
    /// Commands that are issued in pieces and have pieces left.
    splitting: VecDeque<u16>,
    split_in_flight: usize,
    outbox: Outbox,
    /// More commands remain to be accepted after the other sources have had their turn.
    more: bool,
    /// The connection accepts commands.
    serving: bool,
    /// The connection neither receives nor sends, and keeps its state.
    held: bool,
    send_cancelled: bool,
    /// Replies no longer reach the client.
    mute: bool,
    /// The worker is detaching the source.
    stopping: bool,
    stopped: bool,
    ending: Ending,
    on_end: Option<OnEnd>,
    answered: u64,
    activity: Arc<Activity>,
    /// Last field, so that it is dropped after the fields that point into it.
    pool: Pool,
}

impl NbdSource {
    /// Creates a source for a connection. `number` identifies its requests in traces.
    pub fn new(
        stream: Stream,
        export: &ExportView,
        agreed: Agreed,
        limits: Limits,
        number: u16,
        on_end: OnEnd,
    ) -> io::Result<NbdSource> {
        // Blocking mode: an engine that waits for a socket needs it.
        rustix::io::ioctl_fionbio(&stream.socket, false)?;
        // Replies are sent complete, so Nagle's algorithm only delays them. Fails for other sockets
        // than TCP.
        let _ = sockopt::set_tcp_nodelay(&stream.socket, true);
        if sockopt::socket_domain(&stream.socket)? == AddressFamily::UNIX {
            // Room for a large reply while the next one is prepared. TCP sizes its buffer by
            // itself.
            let _ = sockopt::set_socket_send_buffer_size(&stream.socket, SEND_BUFFER);
        }
        let mut pool = Pool::new(limits.memory.max(Limits::MIN_MEMORY))?;
        Ok(NbdSource {
            export: export.clone(),
            agreed,
            mover: None,
            number,
            socket: stream.socket,
            tls: stream.tls.map(Session::new),
            id: None,
            receive: Receive::new(),
            inbox: Inbox::new(&mut pool, &stream.read_ahead)?,
            payload: None,
            table: Table::new(limits.requests.clamp(1, 4096)),
            splitting: VecDeque::new(),
            split_in_flight: 0,
            outbox: Outbox::new(),
            more: false,
            serving: true,
            held: false,
            send_cancelled: false,
            mute: false,
            stopping: false,
            stopped: false,
            ending: Ending::Detached,
            on_end: Some(on_end),
            answered: 0,
            activity: Arc::default(),
            pool,
        })
    }

    /// Returns why the connection ended, for the server's log. Valid once it is detached.
    pub fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Returns the number of commands answered so far.
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns the client's socket.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns whether the connection uses TLS.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Returns the activity of the connection while it is attached.
    pub fn activity(&self) -> Arc<Activity> {
        self.activity.clone()
    }

    /// Updates the activity. A write whose payload is incomplete does not count as being executed.
    #[inline]
    fn note_activity(&self) {
        let payload = self.payload.as_ref();
        let owed = usize::from(payload.is_some_and(|payload| payload.command.is_some()));
        self.activity.set(self.answered, self.table.used() > owed);
    }
}

impl Source for NbdSource {
    fn capacity(&self) -> usize {
        self.table.capacity()
    }

    fn kick_fd(&self) -> Option<RawFd> {
        None
    }

    fn start(&mut self, cx: &mut Cx, id: SourceId) -> io::Result<()> {
        self.id = Some(id);
        cx.engine.add_socket(self.socket.as_fd())?;
        // A connection that was held may have unsent replies.
        self.send(cx);
        Ok(())
    }

    fn completed(&mut self, cx: &mut Cx, tag: u8, result: i32) {
        if tag == RECEIVE {
            self.received(result);
        } else {
            self.sent(result);
            self.send(cx);
        }
        self.settle(cx);
    }

    fn pending(&mut self) -> bool {
        self.more
    }

    /// Pops requests. With a disk that completes immediately, the next receive waits for the
    /// replies, so that both reach the kernel in one call.
    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        let before = batch.len();
        let mut intake = Intake::new(cx, room, batch);
        let stop = self.take_in(&mut intake);
        let answered = intake.answered;
        self.more = stop == Stop::HadItsTurn;
        let popped = batch.len() - before;
        if stop == Stop::NeedsBytes && (popped == 0 || self.table.used() > popped) {
            self.receive(cx);
        }
        if !self.serving {
            self.send(cx);
            self.settle(cx);
        }
        self.note_activity();
        Ok(answered)
    }

    #[inline]
    fn finish(&mut self, request: &Request) {
        self.request_done(request);
    }

    fn publish(&mut self, cx: &mut Cx) -> bool {
        self.note_activity();
        self.send(cx);
        self.settle(cx);
        false
    }

    fn stop(&mut self, cx: &mut Cx) {
        self.stopping = true;
        if self.serving && self.activity.hold.load(Ordering::Relaxed) {
            return self.hold(cx);
        }
        self.leave(Ending::Detached);
        self.abandon();
        self.send(cx);
        self.settle(cx);
    }

    fn has_stopped(&self) -> bool {
        self.stopped
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
