//! A disk on an NBD server.
//!
//! - `endpoint` is the server. The client of `fathom-nbd` negotiates an export with it, on a socket
//!   that `connect` has opened;
//! - `channel` is one worker's access to the export. The channel splits requests into the commands
//!   of `requests`, and sends (`sender`) and receives (`receiver`) them on each `connection`
//!   through the worker's engine, with TLS (`tls_connection`) if the server wants that;
//! - `table` has the commands in flight, and `rules` checks the replies to them;
//! - `links` tracks which channels have connections, and `flushes` which writes are durable;
//! - `unflushed` keeps the writes that the server may still lose, `recovery` reconnects after a
//!   loss, and `replay` sends these writes again and waits for their `answers`;
//! - `changes` asks a Fathom server which parts of a disk have changed since the last query.
//!
//! Everything that a server sends is checked. Received bytes go only into the segments of the
//! request that they answer. A connection on which the server violates the protocol is closed.
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
mod segments;
mod sender;
mod shared;
mod table;
mod tls_connection;
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

/// Upper limit of the physical block size in bytes. A server that prefers larger blocks does not
/// write them atomically.
const MAX_PHYSICAL: u32 = 64 << 10;

/// Maximum number of connections of one worker.
pub const MAX_CONNECTIONS: usize = 16;

/// Default time for which requests wait for a disconnected server.
const DEFAULT_RECONNECT: Duration = Duration::from_secs(60);

/// Options for using an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Whether the export is only read, even if the server permits writes.
    pub read_only: bool,
    /// Whether the guest may discard.
    pub discard: bool,
    /// Whether every write is durable when it completes.
    pub writethrough: bool,
    /// Timeout for connecting and the handshake.
    pub connect_timeout: Duration,
    /// Time after which a server that does not reply to a request counts as dead. None: requests
    /// wait forever.
    pub timeout: Option<Duration>,
    /// Time for which requests wait for a disconnected server before they fail. None: a lost
    /// connection is not re-established, and every request fails from then on.
    pub reconnect: Option<Duration>,
    /// Number of connections of each worker, 1 to [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// Dirty bitmap that replaces the allocation status; the server must have it. Marked ranges are
    /// reported as data and all others as holes, even if data can be read there. Do not use such a
    /// disk as the source of an ordinary copy.
    pub dirty_bitmap: Option<String>,
}

impl NbdOptions {
    /// Returns the metadata context to negotiate.
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
/// Each worker's channel has connections of its own. A server without NBD_FLAG_CAN_MULTI_CONN
/// serves only one worker, with one connection.
///
/// When a connection fails, all connections are closed, and the disk reconnects if
/// [`NbdOptions::reconnect`] allows it. Meanwhile requests wait, including those in flight, and
/// fail with EIO after that time. Writes that the server had confirmed but not flushed are kept,
/// and sent again before anything else.
pub struct NbdDisk {
    shared: Arc<Shared>,
}

impl NbdDisk {
    /// Connects and negotiates the export; blocks. The error is one line that says what to do.
    pub fn connect(uri: &NbdUri, options: NbdOptions) -> Result<NbdDisk, DiskError> {
        debug_assert!((1..=MAX_CONNECTIONS).contains(&options.connections));
        let shared = Arc::new(Shared::connect(uri, options)?);
        Ok(NbdDisk { shared })
    }

    /// Returns the export as the server describes it.
    pub fn export(&self) -> &Export {
        &self.shared.export
    }

    /// Returns the function that abandons the disk: its requests fail from then on, and no
    /// reconnection is tried.
    pub fn halt(&self) -> Halt {
        let shared = Arc::downgrade(&self.shared);
        Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.give_up_for_good();
            }
        })
    }

    /// Returns the error for several workers on a server that accepts one client connection.
    pub fn takes_one_only(&self) -> DiskError {
        self.shared.takes_one_only()
    }

    /// Returns the URI of the server and export.
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
