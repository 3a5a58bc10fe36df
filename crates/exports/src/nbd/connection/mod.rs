//! One connection in the transmission phase: a source of its disk's requests.
//!
//! - `life` receives into the `inbox` (or a large payload's own pages), and
//!   ends,
//! - `intake` makes requests of it, which `check` has found to be in order,
//! - `answer` makes replies of requests that are done,
//! - `outbox` sends them,
//! - `mover` tells a server that takes the disk over what changes,
//! - `state` holds a connection up, and takes it to another process.
//!
//! All memory is the connection's own `pool`: when it is used up, or there is
//! no room for more requests, or replies are not read, nothing is received
//! any more, and the client waits.
//!
//! # Commands
//!
//! - One receive takes in all commands that the socket has. The payload of a small write is used
//!   where it was received. A large payload is received into pages of its own, which suit O_DIRECT.
//! - A long command becomes several requests of 256 KiB, so that other commands get past it.
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

/// A connection whose handshake is over.
pub struct Stream {
    /// Connected.
    pub socket: OwnedFd,
    /// Its handshake is over, too, and nothing waits to be written.
    pub tls: Option<Box<rustls::Connection>>,
    /// What was received behind the handshake (with TLS: as plain text).
    pub read_ahead: Vec<u8>,
}

/// What the handshake has agreed upon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    pub replies: Replies,
    /// The id of base:allocation, if the client has asked for it.
    pub allocation_context: Option<u32>,
    /// Likewise, of the export's dirty bitmap.
    pub bitmap_context: Option<u32>,
}

/// The disk as this connection's client sees it, from beginning to end: a
/// later resize is for later connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportView {
    /// For the log.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// What clients are told that offsets and lengths must be multiples of.
    /// All are served: clients need not ask, and then may send any.
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
            // Parts of sectors are cheap to change here; those of larger
            // blocks are not, and the client may know the rest of them.
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

    /// The transmission flags to send to a client that has agreed on
    /// `replies`. What they do not offer is refused.
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

/// The id of contexts of changes.
pub const CHANGES_ID: u32 = 2;

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

/// What a connection is doing, for other threads to see.
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

    /// Whether it is to be held when it is detached: see [`NbdSource::is_held`].
    pub fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::Relaxed);
    }

    /// None: commands are being carried out. Otherwise how many have been: if
    /// that is the same later, there was none meanwhile.
    pub fn idle_after(&self) -> Option<u64> {
        let word = self.word.load(Ordering::Relaxed);
        (word & 1 == 0).then_some(word >> 1)
    }
}

/// The tags of a connection's own operations.
const RECEIVE: u8 = 0;
const SEND: u8 = 1;

/// Bytes that a Unix socket may hold for its reader, if the system's limit
/// (net.core.wmem_max) allows it.
const SEND_BUFFER: usize = 1 << 20;

/// Memory of a request, as its cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Nothing,
    Pages(Span),
    /// Of the inbox, in this block.
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
    /// It asks what changes.
    mover: Option<Mover>,
    number: u16,
    socket: OwnedFd,
    tls: Option<Session>,
    /// Once it is attached.
    id: Option<SourceId>,
    receive: Box<Receive>,
    inbox: Inbox,
    payload: Option<Payload>,
    table: Table,
    /// Commands that are carried out piece by piece and have pieces left.
    splitting: VecDeque<u16>,
    split_in_flight: usize,
    outbox: Outbox,
    /// There is more to take on, once others have had their turn.
    more: bool,
    /// New commands are taken on.
    serving: bool,
    /// It neither receives nor sends, and nothing of it is forgotten.
    held: bool,
    send_cancelled: bool,
    /// The client hears nothing any more.
    mute: bool,
    /// The worker is to give it back.
    stopping: bool,
    stopped: bool,
    ending: Ending,
    on_end: Option<OnEnd>,
    answered: u64,
    activity: Arc<Activity>,
    /// Last: others point into it.
    pool: Pool,
}

impl NbdSource {
    /// Serve a connection. `number` tells its requests from others' in
    /// traces.
    pub fn new(
        stream: Stream,
        export: &ExportView,
        agreed: Agreed,
        limits: Limits,
        number: u16,
        on_end: OnEnd,
    ) -> io::Result<NbdSource> {
        // An engine that is to wait for a socket must be allowed to.
        rustix::io::ioctl_fionbio(&stream.socket, false)?;
        // A reply is complete when it is sent; only TCP can be told so.
        let _ = sockopt::set_tcp_nodelay(&stream.socket, true);
        if sockopt::socket_domain(&stream.socket)? == AddressFamily::UNIX {
            // Room for a large reply while the next is made. (TCP finds out
            // by itself.)
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

    /// Why it ended, once it is detached: the server's one line of log.
    pub fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Commands answered so far.
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// Its client's.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// What it is doing while it is attached.
    pub fn activity(&self) -> Arc<Activity> {
        self.activity.clone()
    }

    /// A write whose data the client still owes is not being carried out.
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
        // Of one that was held there may be replies.
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

    /// With a disk that completes at once, the next receive waits for the
    /// replies: both go to the kernel together.
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
