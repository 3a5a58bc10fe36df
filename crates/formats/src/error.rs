//! Errors of images and of requests.

use fathom_units::cause;
use std::fmt;
use std::io;

/// Why an image cannot be opened, created, checked or changed. Each message is one line and does
/// not name the image, which only the caller can name.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on the file or device that holds the image failed.
    #[error("{what}: {}", cause(source))]
    Io {
        /// The operation that failed, such as "cannot read the L1 table".
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The image's first bytes are not those of this format.
    #[error("not a {format} image")]
    NotThisFormat {
        /// The format's name on the command line.
        format: &'static str,
    },
    /// A valid image that needs an unsupported feature, or a change that the image's format does
    /// not allow.
    #[error("{0}")]
    Unsupported(String),
    /// An image that violates its format's specification.
    #[error("{0}")]
    Invalid(String),
    /// Options that cannot be fulfilled.
    #[error("{0}")]
    Usage(String),
}

/// A [`Result`](std::result::Result) with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the error for creating or changing an image of a read-only format.
    pub(crate) fn only_read(format: impl fmt::Display) -> Error {
        Error::Unsupported(format!(
            "{format} images can only be read; the formats that can be written are raw, qcow2, qed and luks \
             ('fathom img convert -O qcow2' converts an image)"
        ))
    }

    /// Returns a function for `map_err` that adds the failed operation `what` to a system error.
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
