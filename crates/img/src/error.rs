//! What went wrong, for the user.

use fathom_core::DiskError;
use fathom_formats::Error as FormatError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a tool did not do its work; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image or the options are wrong.
    #[error("{}: {source}", path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// There is nothing to check.
    #[error("{}: raw images have no metadata that could be checked", path.display())]
    Raw {
        /// The image.
        path: PathBuf,
    },
    /// The image is in use.
    #[error(transparent)]
    Locked(#[from] DiskError),
}

pub(crate) fn of(path: &Path) -> impl Fn(FormatError) -> Error {
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
