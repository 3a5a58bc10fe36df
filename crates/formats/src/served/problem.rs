//! What is wrong with a file, for people: one line that names it.

use crate::Error;
use fathom_core::DiskError;
use std::path::Path;

pub(super) fn unusable(path: &Path, problem: impl Into<String>) -> DiskError {
    DiskError::Unusable {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// The error of an image, for people.
pub(super) fn told(path: &Path) -> impl FnOnce(Error) -> DiskError {
    let path = path.to_owned();
    move |error| unusable(&path, error.to_string())
}
