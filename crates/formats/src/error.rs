//! What can be wrong with an image or with what was asked for.

use crate::Format;
use fathom_units::cause;
use std::io;

/// Why an image is not opened, created or checked. Each is one line, without
/// the image's name, which only the caller knows.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file or device under the image failed.
    #[error("{what}: {}", cause(source))]
    Io {
        /// What was tried, such as "cannot read the L1 table".
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The image's first bytes are not those of this format.
    #[error("not a {format} image")]
    NotThisFormat {
        /// Its name on the command line.
        format: &'static str,
    },
    /// A valid image that needs something which is not there.
    #[error("{0}")]
    Unsupported(String),
    /// An image that contradicts its format's specification.
    #[error("{0}")]
    Invalid(String),
    /// Options that cannot be met.
    #[error("{0}")]
    Usage(String),
}

/// With an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Of an image of another program that was to be made or changed.
    pub(crate) fn only_read(format: Format) -> Error {
        Error::Unsupported(format!(
            "{format} images can only be read; the formats that can be written are raw, qcow2, qed and luks \
             ('fathom img convert -O qcow2' converts an image)"
        ))
    }
    /// For `map_err`: the system refused `what`.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { what, source }
    }

    pub(crate) fn invalid(problem: impl Into<String>) -> Error {
        Error::Invalid(problem.into())
    }

    pub(crate) fn unsupported(problem: impl Into<String>) -> Error {
        Error::Unsupported(problem.into())
    }

    pub(crate) fn usage(problem: impl Into<String>) -> Error {
        Error::Usage(problem.into())
    }
}
