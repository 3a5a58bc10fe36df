//! Errors of a server.

use crate::stop_timeout::StopTimeout;
use fathom_sockets::{InheritedError, ListenError};
use fathom_tls::TlsError;
use fathom_trace::TraceError;
use fathom_units::cause;
use std::io;

/// Why the server did not start, or ended by itself. The text is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that exclude each other, or an error that is already a line for the user.
    #[error("{0}")]
    Options(String),
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] fathom_stack::Error),
    /// A socket cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The API cannot listen.
    #[error(transparent)]
    Api(#[from] fathom_api::OpenError),
    /// A socket that this process has inherited cannot be used.
    #[error(transparent)]
    Inherited(#[from] InheritedError),
    /// TLS cannot be used, for example because a certificate cannot be read.
    #[error("--tls: {0}")]
    Tls(#[from] TlsError),
    /// The trace file cannot be used.
    #[error("--trace: {0}")]
    Trace(#[from] TraceError),
    /// Requests in flight did not complete before the timeout.
    #[error(
        "stopping took longer than {timeout} (--stop-timeout); requests in flight of {whose} are \
         abandoned"
    )]
    Abandoned {
        /// Time that the server had for stopping.
        timeout: StopTimeout,
        /// Disks or tenants with such requests, as a list for the user.
        whose: String,
    },
    /// A system call failed.
    #[error("{what}: {}", cause(source))]
    Io {
        /// Description of the failed step, such as `cannot wait for events`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

impl Error {
    /// Returns a function for `map_err` that adds a description to the error of a system call.
    pub fn io(what: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { what, source }
    }
}
