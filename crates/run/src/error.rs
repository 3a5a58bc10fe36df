//! Errors of writing and reading run directories.

use fathom_units::cause;
use std::io;
use std::path::{Path, PathBuf};

/// An error, in one line that names the file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on a file or directory failed.
    #[error("{}: {}", path.display(), cause(source))]
    Io {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The contents of a file or directory cannot be used.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// Path of the file or directory.
        path: PathBuf,
        /// Reason for the user.
        problem: String,
    },
}

/// Result of the functions that read and write run directories.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn unusable(path: &Path, problem: impl Into<String>) -> Error {
        Error::Unusable {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }
}
