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
    Connect {
        /// Path of the socket, or NBD URI of the server.
        path: PathBuf,
        /// Error of the system call.
        cause: io::Error,
    },
    /// The server lacks a feature that the options ask for.
    #[error("the server does not offer {feature}: {hint}")]
    Refused {
        /// Name of the missing feature in the specification.
        feature: &'static str,
        /// Advice for the user: the option to leave out, or the consequence.
        hint: &'static str,
    },
    /// A vhost-user message failed.
    #[error("{what} failed: {}", fathom_units::cause(cause))]
    Message {
        /// Name of the message in the specification, such as `GET_FEATURES`.
        what: &'static str,
        /// Error of the vhost-user front-end.
        cause: vhost::Error,
    },
    /// The server closed the connection instead of replying to a vhost-user message.
    #[error("{what}: the server closed the connection without a reply; see its log")]
    HungUp {
        /// Name of the message in the specification, such as `GET_FEATURES`.
        what: &'static str,
    },
    /// The server did not reply to a vhost-user message in time.
    #[error("{what}: no reply within {} s; the server may be waiting for its storage", limit.as_secs())]
    Late {
        /// Name of the message in the specification, such as `GET_FEATURES`.
        what: &'static str,
        /// Time within which the server had to reply.
        limit: Duration,
    },
    /// The server violated the virtqueue specification or the vhost-user protocol, or a worker had
    /// requests in flight and none completed within the timeout.
    #[error("queue {queue}: {what}")]
    Device {
        /// Number of the queue or worker, from 0.
        queue: usize,
        /// Description of the problem.
        what: String,
    },
    /// The NBD handshake failed.
    #[error("NBD handshake: {0}")]
    Handshake(String),
    /// An NBD server violated the protocol.
    #[error("connection {connection}: the server broke the NBD protocol: {what}")]
    Connection {
        /// Number of the connection, from 0.
        connection: usize,
        /// Description of the violation.
        what: String,
    },
    /// The server disconnected, and reconnecting was not requested or took too long.
    #[error("{0}")]
    Gone(String),
    /// A request failed.
    #[error("{op} of {len} bytes at offset {offset} failed: {status}")]
    Request {
        /// Name of the operation ([`Op::name`](crate::Op::name)).
        op: &'static str,
        /// Offset of the request in bytes.
        offset: u64,
        /// Length of the request in bytes.
        len: u32,
        /// Description of the status with which the request completed.
        status: String,
    },
    /// Data that was read is not the data that was written.
    #[error("verify: block {block} (offset {offset}): expected {expected}, found {found}")]
    Verify {
        /// Number of the block in the used range, from 0.
        block: u64,
        /// Offset of the block on the disk in bytes.
        offset: u64,
        /// Description of the contents that the block may have.
        expected: String,
        /// Description of the contents that were read.
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
        /// Path of the file.
        path: PathBuf,
        /// Offset of the first wrong sector in the file, in bytes.
        offset: u64,
        /// Description of the sector's contents.
        found: String,
    },
    /// fio failed, or its report has an unexpected form.
    #[error("fio: {0}")]
    Fio(String),
    /// A page that the server wrote is not marked in the dirty log.
    #[error("dirty log: page {page:#x} ({what}) of queue {queue} was written but is not marked")]
    DirtyLog {
        /// Number of the virtqueue, from 0.
        queue: usize,
        /// Number of the page: its guest-physical address divided by 4096.
        page: u64,
        /// Part of a request that the server wrote to the page, such as `data` or `used ring`.
        what: &'static str,
    },
    /// The verify state file cannot be used.
    #[error("verify state {}: {what}", path.display())]
    State {
        /// Path of the verify state file.
        path: PathBuf,
        /// Reason for the user, such as another block size.
        what: String,
    },
    /// A system call failed.
    #[error("{what}: {}", fathom_units::cause(cause))]
    Os {
        /// Name of the failed action.
        what: String,
        /// Error of the system call.
        cause: io::Error,
    },
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
