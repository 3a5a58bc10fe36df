//! What goes wrong, for users.

use fathom_units::cause;
use std::io;

/// Why something of an archive or a server cannot be had; one line for the user. `what` is its address.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: not found; check the name")]
    NotFound { what: String },
    /// It is another one than when it was opened.
    #[error(
        "{what}: changed since it was opened; open it again, or use a copy that does not change"
    )]
    Changed { what: String },
    #[error("{what}: damaged, so not used: {problem}")]
    Corrupt { what: String, problem: String },
    /// It may be there a moment later.
    #[error("{what}: unreachable: {problem}; retry later")]
    Unreachable { what: String, problem: String },
    /// Not with these credentials.
    #[error("{what}: access denied: {problem}")]
    Refused { what: String, problem: String },
    /// The address, or what is there, is none that can be used.
    #[error("{what}: {problem}")]
    Unusable { what: String, problem: String },
    #[error("{what}: already exists")]
    Exists { what: String },
    /// The machine's own file system.
    #[error("{what}: {}", cause(source))]
    Io { what: String, source: io::Error },
}

impl Error {
    /// Whether the same may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Unreachable { .. })
    }

    pub(crate) fn corrupt(what: impl Into<String>, problem: impl Into<String>) -> Error {
        let (what, problem) = (what.into(), problem.into());
        Error::Corrupt { what, problem }
    }

    pub(crate) fn unusable(what: impl Into<String>, problem: impl Into<String>) -> Error {
        let (what, problem) = (what.into(), problem.into());
        Error::Unusable { what, problem }
    }
}
