//! Why the API cannot listen.

use fathom_sockets::{InheritedError, ListenError};
use fathom_units::cause;
use std::io;

/// The API cannot listen: one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// An option is wrong, or its address cannot be used.
    #[error("{0}")]
    Options(String),
    /// The Unix socket cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A socket that this process has inherited cannot be used.
    #[error(transparent)]
    Inherited(#[from] InheritedError),
    /// The directory of a socket cannot be created or used.
    #[error("{what}: {}", cause(source))]
    Directory {
        /// Description of the failure, such as `cannot create the directory of a socket`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns a function that adds `what` to an error, for [`OpenError::Directory`].
    pub fn directory(what: &'static str) -> impl Fn(io::Error) -> OpenError {
        move |source| OpenError::Directory { what, source }
    }
}
