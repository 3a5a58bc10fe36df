//! Errors of the image commands.

use fathom_core::DiskError;
use fathom_formats::Error as FormatError;
use fathom_units::cause;
use std::io;
use std::path::{Path, PathBuf};

/// Why an image command failed. Each error is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image or the options are invalid.
    #[error("{}: {source}", path.display())]
    Format {
        /// Path of the image.
        path: PathBuf,
        /// Cause of the failure.
        source: FormatError,
    },
    /// The image has no metadata that can be checked.
    #[error("{}: only the metadata of qcow2 and qed images can be checked", path.display())]
    Raw {
        /// Path of the image.
        path: PathBuf,
    },
    /// The disk cannot be opened or locked, for example because another process uses the image.
    #[error(transparent)]
    Locked(#[from] DiskError),
    /// Data of a disk cannot be read or written.
    #[error("{}: cannot {what} {len} bytes at offset {offset} of its disk: {}", path.display(), cause(source))]
    Data {
        /// Path of the image, or location of the disk.
        path: PathBuf,
        /// Operation that failed, as a verb for messages: `read`, `write` or `map`.
        what: &'static str,
        /// Offset of the range on the disk, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Error of the operation.
        source: io::Error,
    },
    /// Data of a disk cannot be made durable.
    #[error("{}: cannot flush: {}", path.display(), cause(source))]
    Flush {
        /// Path of the image, or location of the disk.
        path: PathBuf,
        /// Error of the flush.
        source: io::Error,
    },
    /// The target's file system is full.
    #[error("{}: no space left on its device: up to {missing} more bytes are needed", path.display())]
    NoSpace {
        /// Path of the target.
        path: PathBuf,
        /// Maximum number of bytes that do not fit.
        missing: u64,
    },
    /// An object of an archive is not accessible or is invalid.
    #[error(transparent)]
    Archive(#[from] fathom_archive::Error),
    /// No memory is available for a data buffer.
    #[error("no memory for a buffer: {}", cause(.0))]
    Memory(io::Error),
    /// The user has cancelled the job.
    #[error("interrupted")]
    Interrupted,
}

pub(crate) fn of(path: &Path) -> impl Fn(FormatError) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Format {
        path: path.clone(),
        source,
    }
}

pub(crate) fn io_error(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Error {
    let told = of(path);
    move |source| told(FormatError::Io { what, source })
}

pub(crate) fn usage(path: &Path, problem: impl Into<String>) -> Error {
    of(path)(FormatError::Usage(problem.into()))
}

/// Paths of the source and the target of a data transfer, for error messages.
#[derive(Clone, Copy, Debug)]
pub struct Moving<'a> {
    pub source: &'a Path,
    pub target: &'a Path,
}

impl Moving<'_> {
    pub(crate) fn read_error(&self, offset: u64, len: u64, errno: i32) -> Error {
        Error::data(self.source, "read", offset, len, errno)
    }

    pub(crate) fn write_error(&self, offset: u64, len: u64, errno: i32) -> Error {
        Error::data(self.target, "write", offset, len, errno)
    }
}

impl Error {
    pub(crate) fn data(
        path: &Path,
        what: &'static str,
        offset: u64,
        len: u64,
        errno: i32,
    ) -> Error {
        Error::Data {
            path: path.to_owned(),
            what,
            offset,
            len,
            source: io::Error::from_raw_os_error(errno),
        }
    }

    /// Returns whether the job may have moved some data before this error.
    pub(crate) fn is_midway(&self) -> bool {
        matches!(
            self,
            Error::Interrupted | Error::Data { .. } | Error::NoSpace { .. } | Error::Flush { .. }
        )
    }

    /// Converts an error caused by ENOSPC into [`Error::NoSpace`], with the number of missing
    /// bytes. Returns any other error unchanged.
    pub(crate) fn needing(self, missing: impl FnOnce() -> u64) -> Error {
        match self {
            Error::Data { path, source, .. } if source.raw_os_error() == Some(libc::ENOSPC) => {
                let missing = missing();
                Error::NoSpace { path, missing }
            }
            Error::Format {
                path,
                source: FormatError::Io { source, .. },
            } if source.raw_os_error() == Some(libc::ENOSPC) => {
                let missing = missing();
                Error::NoSpace { path, missing }
            }
            other => other,
        }
    }

    pub(crate) fn flush(path: &Path, errno: i32) -> Error {
        Error::Flush {
            path: path.to_owned(),
            source: io::Error::from_raw_os_error(errno),
        }
    }

    pub(crate) fn memory(source: io::Error) -> Error {
        Error::Memory(source)
    }
}
