//! Errors of a load. Each is one line that describes the problem.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of a load, one variant per cause. The text is complete and includes the cause, so `source`
/// returns `None`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict each other or the disk.
    #[error("{0}")]
    Options(String),
    /// No process listens on the socket, or the socket cannot be opened.
    #[error("cannot connect to {}: {}", path.display(), fathom_units::cause(cause))]
    Connect { path: PathBuf, cause: io::Error },
    /// The server lacks a feature that the options ask for.
    #[error("the server does not offer {feature}: {hint}")]
    Refused {
        feature: &'static str,
        hint: &'static str,
    },
    /// A vhost-user message failed. `what` is its name in the specification.
    #[error("{what} failed: {}", fathom_units::cause(cause))]
    Message {
        what: &'static str,
        cause: vhost::Error,
    },
    /// The server closed the connection instead of replying.
    #[error("{what}: the server closed the connection without a reply; see its log")]
    HungUp { what: &'static str },
    /// The server did not reply in time.
    #[error("{what}: no reply within {} s; the server may be waiting for its storage", limit.as_secs())]
    Late { what: &'static str, limit: Duration },
    /// The server violated the virtqueue specification or the vhost-user protocol.
    #[error("queue {queue}: {what}")]
    Device { queue: usize, what: String },
    /// The NBD handshake failed.
    #[error("NBD handshake: {0}")]
    Handshake(String),
    /// An NBD server violated the protocol.
    #[error("connection {connection}: the server broke the NBD protocol: {what}")]
    Connection { connection: usize, what: String },
    /// The server disconnected, and reconnecting was not requested or took too long.
    #[error("{0}")]
    Gone(String),
    /// A request failed.
    #[error("{op} of {len} bytes at offset {offset} failed: {status}")]
    Request {
        op: &'static str,
        offset: u64,
        len: u32,
        status: String,
    },
    /// Data that was read is not the data that was written.
    #[error("verify: block {block} (offset {offset}): expected {expected}, found {found}")]
    Verify {
        block: u64,
        offset: u64,
        expected: String,
        found: String,
    },
    /// A file system has no space for the files to be written.
    #[error("{0}")]
    Full(String),
    /// Another process has changed the files of a load.
    #[error("{0}")]
    Changed(String),
    /// A file does not contain what was written to it.
    #[error("verify: {} at offset {offset}: found {found}", path.display())]
    Contents {
        path: PathBuf,
        offset: u64,
        found: String,
    },
    /// fio failed, or its report has an unexpected form.
    #[error("fio: {0}")]
    Fio(String),
    /// A page that the server wrote is not marked in the dirty log.
    #[error("dirty log: page {page:#x} ({what}) of queue {queue} was written but is not marked")]
    DirtyLog {
        queue: usize,
        page: u64,
        what: &'static str,
    },
    /// The verify state file does not belong to this run.
    #[error("verify state {}: {what}", path.display())]
    State { path: PathBuf, what: String },
    /// A system call failed.
    #[error("{what}: {}", fathom_units::cause(cause))]
    Os { what: String, cause: io::Error },
    /// Another worker failed, and its error is the one to report.
    #[error("stopped because another queue failed")]
    Aborted,
}

impl Error {
    /// Creates an error for a failed system call. `what` names the failed action.
    pub fn os(what: impl Into<String>, cause: impl Into<io::Error>) -> Self {
        Error::Os {
            what: what.into(),
            cause: cause.into(),
        }
    }
}
