//! What the disk and all its channels know.

use super::NbdOptions;
use super::connect::Dialled;
use super::connector::Connector;
use fathom_core::DiskError;
use fathom_nbd::NbdUri;
use fathom_nbd::client::{Export, Wishes, handshake};
use fathom_nbd::protocol::{Replies, RequestHeader, command};
use rustix::net::{SendFlags, send};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// A connection whose handshake is over, and that nobody uses yet.
pub(super) struct Connected {
    socket: Option<OwnedFd>,
    /// See [`Export::allocation`].
    allocation: Option<u32>,
}

impl Connected {
    /// The socket, and the id of base:allocation.
    pub(super) fn into_parts(mut self) -> (OwnedFd, Option<u32>) {
        let socket = self.socket.take();
        (socket.expect("it is given away once"), self.allocation)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            say_goodbye(socket);
        }
    }
}

/// A server that is not told takes it for a failure.
pub(super) fn say_goodbye(socket: &OwnedFd) {
    let goodbye = RequestHeader {
        flags: 0,
        command: command::DISC,
        cookie: 0,
        offset: 0,
        len: 0,
    };
    let _ = send(
        socket,
        &goodbye.compact(),
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
}

/// When writes were completed, by one channel's count of flushes.
pub(super) type Mark = Arc<AtomicU64>;

pub(super) struct Shared {
    pub(super) uri: NbdUri,
    pub(super) options: NbdOptions,
    pub(super) export: Export,
    /// The disk's first connection, until a channel takes it.
    first: Mutex<Option<Connected>>,
    pub(super) connector: Connector,
    /// One channel's each.
    marks: Mutex<Vec<Mark>>,
    /// Flushes that have been started.
    flush: AtomicU64,
    /// The last of them that has succeeded.
    flushed: AtomicU64,
    flush_failed: AtomicBool,
}

impl Shared {
    pub(super) fn connect(uri: &NbdUri, options: NbdOptions) -> Result<Shared, DiskError> {
        let (connected, export) = dial(uri, &options)?;
        let unusable = |problem: String| {
            let path = PathBuf::from(uri.as_str());
            Err(DiskError::Unusable { path, problem })
        };
        if export.is_read_only() && !options.read_only {
            return unusable("the server allows reading only: pass --readonly".into());
        }
        let connector = Connector::start().map_err(|source| DiskError::Io {
            path: PathBuf::from(uri.as_str()),
            what: "cannot start a thread to connect",
            source,
        })?;
        let shared = Shared {
            connector,
            uri: uri.clone(),
            options,
            export,
            first: Mutex::new(Some(connected)),
            marks: Mutex::default(),
            flush: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            flush_failed: AtomicBool::new(false),
        };
        let size = shared.size();
        if size == 0 {
            let problem = format!("is {} bytes long; a disk needs 512 at least", export.size);
            return unusable(problem);
        }
        if size != export.size {
            tracing::warn!(
                "{uri}: its last {} bytes are not a whole block and will not be visible",
                export.size - size
            );
        }
        Ok(shared)
    }

    pub(super) fn name(&self) -> PathBuf {
        PathBuf::from(self.uri.as_str())
    }

    /// Of the disk, in bytes: whole blocks.
    pub(super) fn size(&self) -> u64 {
        self.export.size & !u64::from(self.export.minimum_block.max(512) - 1)
    }

    /// A connection for one more channel.
    pub(super) fn connection(self: &Arc<Shared>) -> Result<Connected, DiskError> {
        if let Some(first) = lock(&self.first).take() {
            return Ok(first);
        }
        if !self.export.can_multi_conn() {
            return Err(self.takes_one_only());
        }
        let (done, outcome) = sync_channel(1);
        let shared = self.clone();
        let connect = move || drop(done.send(shared.connect_again()));
        self.connector.ask(connect);
        outcome.recv().map_err(|_| DiskError::Unusable {
            path: self.name(),
            problem: "its connecting thread has ended".into(),
        })?
    }

    pub(super) fn takes_one_only(&self) -> DiskError {
        DiskError::Unusable {
            path: self.name(),
            problem: "the server takes one connection only (it does not offer CAN_MULTI_CONN): \
                      use --iothreads 1"
                .into(),
        }
    }

    /// Connects once more, blocking. The export must still be the same.
    pub(super) fn connect_again(&self) -> Result<Connected, DiskError> {
        let (connected, export) = dial(&self.uri, &self.options)?;
        // The id is the server's to choose, each time.
        let same_context = export.allocation.is_some() == self.export.allocation.is_some();
        let export = Export {
            allocation: self.export.allocation,
            ..export
        };
        match same_context && export == self.export {
            true => Ok(connected),
            false => Err(DiskError::Unusable {
                path: self.name(),
                problem: "the server's export is not what it was (its size, or what it can do)"
                    .into(),
            }),
        }
    }

    pub(super) fn flush_has_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Relaxed)
    }

    pub(super) fn new_mark(&self) -> Mark {
        let mark = Mark::default();
        lock(&self.marks).push(mark.clone());
        mark
    }

    /// A write has been completed that is not durable. Flushes that begin
    /// from now on have larger numbers than the mark.
    #[inline]
    pub(super) fn wrote(&self, mark: &Mark) {
        mark.store(self.flush.load(Ordering::SeqCst) + 1, Ordering::Relaxed);
    }

    /// A flush begins; returns its number.
    pub(super) fn begin_flush(&self) -> u64 {
        self.flush.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// This flush has succeeded.
    pub(super) fn flushed(&self, number: u64) {
        self.flushed.fetch_max(number, Ordering::SeqCst);
    }

    /// A connection is lost, and with it, perhaps, what the server had not
    /// made durable: that of all connections, since it may be the server that
    /// is gone. True if this is the first time that something may be.
    pub(super) fn lost_connection(&self) -> bool {
        let flushed = self.flushed.load(Ordering::SeqCst);
        let marks = lock(&self.marks);
        let dirty = marks.iter().any(|m| m.load(Ordering::SeqCst) > flushed);
        dirty && !self.flush_failed.swap(true, Ordering::SeqCst)
    }
}

fn dial(uri: &NbdUri, options: &NbdOptions) -> Result<(Connected, Export), DiskError> {
    let failed = |what| {
        move |source: io::Error| DiskError::Io {
            path: PathBuf::from(uri.as_str()),
            what,
            source,
        }
    };
    let deadline = Instant::now() + options.connect_timeout;
    let mut stream = Dialled::new(uri, deadline).map_err(failed("cannot connect"))?;
    let wishes = Wishes {
        export: uri.export(),
        replies: &[Replies::Structured],
        allocation: true,
    };
    let export = handshake(&mut stream, &wishes).map_err(|refusal| DiskError::Unusable {
        path: PathBuf::from(uri.as_str()),
        problem: refusal.0,
    })?;
    let socket = stream.into_socket();
    let socket = socket.map_err(failed("its socket cannot be set up"))?;
    let connected = Connected {
        socket: Some(socket),
        allocation: export.allocation,
    };
    Ok((connected, export))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
