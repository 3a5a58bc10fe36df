//! Problems of files as errors for the user: one line that names the file.

use crate::Error;
use fathom_core::DiskError;
use std::path::Path;

pub(super) fn unusable(path: &Path, problem: impl Into<String>) -> DiskError {
    DiskError::Unusable {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// Converts an image's error to an error of this file.
pub(super) fn told(path: &Path) -> impl FnOnce(Error) -> DiskError {
    let path = path.to_owned();
    move |error| unusable(&path, error.to_string())
}
