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
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Inherited(#[from] InheritedError),
    #[error("{what}: {}", cause(source))]
    Directory {
        what: &'static str,
        source: io::Error,
    },
}

impl OpenError {
    pub fn directory(what: &'static str) -> impl Fn(io::Error) -> OpenError {
        move |source| OpenError::Directory { what, source }
    }
}
