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
    #[error(transparent)]
    Disk(#[from] fathom_stack::Error),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Api(#[from] fathom_api::OpenError),
    #[error(transparent)]
    Inherited(#[from] InheritedError),
    #[error("--tls: {0}")]
    Tls(#[from] TlsError),
    #[error("--trace: {0}")]
    Trace(#[from] TraceError),
    #[error(
        "stopping took longer than {timeout} (--stop-timeout); requests in flight of {whose} are \
         abandoned"
    )]
    Abandoned { timeout: StopTimeout, whose: String },
    #[error("{what}: {}", cause(source))]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl Error {
    pub fn io(what: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { what, source }
    }
}
