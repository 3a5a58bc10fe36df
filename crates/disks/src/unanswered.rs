//! The error for a request to end a job while the disk's own images do not respond.

use fathom_control::{ErrorKind, RequestError};
use fathom_formats::served::ChainImage;
use fathom_units::redacted;

/// Returns the first and the last of these images as text for errors.
pub fn span(images: &[ChainImage]) -> String {
    let shown = |image: &ChainImage| redacted(&image.path.display().to_string()).into_owned();
    match images {
        [] => "its images".to_owned(),
        [only] => shown(only),
        [first, last] => format!("{} or {}", shown(first), shown(last)),
        [first, .., last] => format!(
            "one of the images from {} down to {}",
            shown(first),
            shown(last)
        ),
    }
}

/// Returns the error for a job that waits for requests to one of these images.
///
/// Until those requests are complete, no other job may use the images: a late write would overwrite
/// that job's data.
pub fn error(images: &str) -> RequestError {
    ErrorKind::Late.because(format!(
        "stopping: the storage of {images} does not respond; the job ends when that storage \
         responds, and the disk is unchanged"
    ))
}
