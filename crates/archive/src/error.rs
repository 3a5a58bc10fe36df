//! Errors for users.

use fathom_units::cause;
use std::io;

/// A reason why an archive or an object is unavailable, as one line for the user.
///
/// `what` is the address of the archive or the object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive or the object does not exist.
    #[error("{what}: not found; check the name")]
    NotFound {
        /// Address of the archive or the object.
        what: String,
    },
    /// The object has been replaced or modified since it was opened.
    #[error(
        "{what}: changed since it was opened; open it again, or use a copy that does not change"
    )]
    Changed {
        /// Address of the object.
        what: String,
    },
    /// The contents of the object are damaged.
    #[error("{what}: damaged, so not used: {problem}")]
    Corrupt {
        /// Address of the object.
        what: String,
        /// Description of the damage, for the user.
        problem: String,
    },
    /// The server cannot be reached. A retry may succeed.
    #[error("{what}: unreachable: {problem}; retry later")]
    Unreachable {
        /// Address of the archive or the object.
        what: String,
        /// Cause, for the user.
        problem: String,
    },
    /// The server does not accept the credentials.
    #[error("{what}: access denied: {problem}")]
    Refused {
        /// Address of the archive or the object.
        what: String,
        /// Reply of the server, and what to do, for the user.
        problem: String,
    },
    /// The address is invalid, or what it names cannot be used.
    #[error("{what}: {problem}")]
    Unusable {
        /// The address, as shown to the user.
        what: String,
        /// Reason, and what to do, for the user.
        problem: String,
    },
    /// An object already exists at the address.
    #[error("{what}: already exists")]
    Exists {
        /// Address of the object.
        what: String,
    },
    /// The local file system reported an error.
    #[error("{what}: {}", cause(source))]
    Io {
        /// Path of the file or directory, or address of the object.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
}

impl Error {
    /// Returns whether a retry may succeed.
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
