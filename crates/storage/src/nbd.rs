//! A disk that an NBD server has.
//!
//! - `endpoint` is the server, with which the client of `fathom-nbd` agrees on
//!   an export, on a socket that `connect` has made;
//! - `channel` is one worker's way to it, and makes commands of `requests`; on
//!   each `connection` it sends (`sender`) and receives (`receiver`) through
//!   the worker's engine, by TLS if it is `sealed`;
//! - `table` knows the commands in flight, and `rules` what may be said of
//!   them;
//! - `links` knows which channel has connections, and `flushes` what is durable;
//! - `unflushed` keeps what the server may yet lose, `recovery` finds it again
//!   when it was lost, and `replay` writes that once more, whose `answers` it waits for;
//! - `changes` asks a server of Fathom's what has changed since it was asked last.
//!
//! What a server says is checked before it is believed: whatever it sends, no
//! byte goes anywhere but into the segments of a request that it answers. A
//! connection on which it breaks the rules is closed.
//!
//! # Requests
//!
//! A request is sent at once unless a message is being sent. Commands that arrive meanwhile are
//! sent together in the next message. A request completes when all of its commands have replies and
//! the engine no longer uses the request's memory. A connection that fails is therefore shut down
//! and drained before its requests complete.
//!
//! # Lost connections
//!
//! All connections of a disk are lost together. The first channel that notices the loss wakes the
//! others. Each channel shuts its connections down, waits until the engine no longer uses any
//! memory, queues its unanswered requests again, and hands over its unflushed writes. The last
//! channel starts a thread, which connects again, sends the unflushed writes, and gives each
//! channel new connections.

mod answers;
mod changes;
mod channel;
mod connect;
mod connection;
mod connector;
mod coverage;
mod endpoint;
mod flushes;
#[cfg(feature = "testing")]
pub mod fuzz;
mod halt;
mod links;
mod place;
mod receiver;
mod recovery;
mod replay;
mod requests;
mod rules;
mod sealed;
mod segments;
mod sender;
mod shared;
mod table;
mod unflushed;

use fathom_nbd::NbdUri;
use fathom_nbd::client::Export;

use crate::kind::Halt;
pub use changes::{ChangesClient, Refused};
use channel::NbdChannel;
pub use connect::connect;
use endpoint::cannot_start;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits};
use fathom_nbd::protocol::{BASE_ALLOCATION, DIRTY_BITMAP, export_flag};
pub(crate) use place::KIND;
use shared::Shared;
use std::sync::Arc;
use std::time::Duration;

/// A server that prefers larger blocks does not write them in one piece.
const MAX_PHYSICAL: u32 = 64 << 10;

/// More connections of one worker are not needed for anything.
pub const MAX_CONNECTIONS: usize = 16;

/// Time that requests wait for a server that is away, unless something else is asked for.
const DEFAULT_RECONNECT: Duration = Duration::from_secs(60);

/// How to use an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    pub read_only: bool,
    /// Whether the guest may discard.
    pub discard: bool,
    /// A write is durable when it completes.
    pub writethrough: bool,
    /// For connecting and the handshake.
    pub connect_timeout: Duration,
    /// A server that says nothing of a request for so long is taken for dead.
    /// None: wait for ever.
    pub timeout: Option<Duration>,
    /// Time that requests wait for a server that is away before they fail. None: a lost connection is not made again,
    /// and every request fails from then on.
    pub reconnect: Option<Duration>,
    /// Connections of each worker, 1 to [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// What parts of the disk are is not whether they hold data, but whether this dirty bitmap, which the
    /// server must have, marks them: what it marks is data, all else is a hole, whatever can be read there.
    /// Nobody may copy the disk who does not know.
    pub dirty_bitmap: Option<String>,
}

impl NbdOptions {
    /// The metadata context that goes with it.
    fn context(&self) -> String {
        match &self.dirty_bitmap {
            Some(bitmap) => format!("{DIRTY_BITMAP}{bitmap}"),
            None => BASE_ALLOCATION.into(),
        }
    }
}

impl Default for NbdOptions {
    fn default() -> NbdOptions {
        NbdOptions {
            read_only: false,
            discard: true,
            writethrough: false,
            connect_timeout: Duration::from_secs(10),
            timeout: Some(Duration::from_secs(60)),
            reconnect: Some(DEFAULT_RECONNECT),
            connections: 1,
            dirty_bitmap: None,
        }
    }
}

/// An export of an NBD server.
///
/// Each worker's channel has connections of its own. A server that does not
/// offer NBD_FLAG_CAN_MULTI_CONN serves one worker, with one connection, only.
///
/// When a connection fails, all are given up, and the server is looked for
/// again, if [`NbdOptions::reconnect`] allows that. Requests wait meanwhile, those
/// in flight, too, and fail with EIO after that time. What the server had confirmed, and not flushed, is
/// kept here and written again before anything else is.
pub struct NbdDisk {
    shared: Arc<Shared>,
}

impl NbdDisk {
    /// Connects and agrees with the server on the export, blocking. The error
    /// is one line that says what to do.
    pub fn connect(uri: &NbdUri, options: NbdOptions) -> Result<NbdDisk, DiskError> {
        debug_assert!((1..=MAX_CONNECTIONS).contains(&options.connections));
        let shared = Arc::new(Shared::connect(uri, options)?);
        Ok(NbdDisk { shared })
    }

    /// What the server says of its export.
    pub fn export(&self) -> &Export {
        &self.shared.export
    }

    /// Returns what gives the disk up: its requests fail from then on, and its server is not looked for any more.
    pub fn halt(&self) -> Halt {
        let shared = Arc::downgrade(&self.shared);
        Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.give_up_for_good();
            }
        })
    }

    /// What to say when several workers want a disk whose server takes one.
    pub fn takes_one_only(&self) -> DiskError {
        self.shared.takes_one_only()
    }

    /// Where the server is.
    pub fn uri(&self) -> &NbdUri {
        self.shared.endpoint.uri()
    }
}

impl Disk for NbdDisk {
    fn info(&self) -> DiskInfo {
        let Shared {
            export, options, ..
        } = &*self.shared;
        let block_size = export.minimum_block.max(512);
        let writable = !options.read_only;
        let physical = export.preferred_block.clamp(4096, MAX_PHYSICAL);
        let physical = physical.max(block_size);
        let limits = |flag, max_len| {
            let limits = RangeLimits {
                alignment: export.preferred_block.max(block_size),
                max_len,
            };
            (writable && export.has(flag)).then_some(limits)
        };
        DiskInfo {
            size: self.shared.size(),
            block_size,
            physical_block_size: physical,
            optimal_io_size: match export.preferred_block > physical {
                true => export.preferred_block,
                false => 0,
            },
            read_only: options.read_only,
            write_cache: export.has_cache() && !options.writethrough,
            discard: limits(export_flag::SEND_TRIM, requests::MAX_TRIM).filter(|_| options.discard),
            write_zeroes: limits(export_flag::SEND_WRITE_ZEROES, requests::MAX_TRIM),
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.shared.settle()
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let (seat, given) = self.shared.join()?;
        let channel = NbdChannel::new(self.shared.clone(), seat, given, cx);
        let channel = channel.map_err(|source| cannot_start(&self.shared.endpoint, source))?;
        Ok(Box::new(channel))
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        self.shared.halt.halt();
    }
}
