//! What is told of a job that was ended while its disk's own images do not answer.

use fathom_control::{ErrorKind, RequestError};
use fathom_formats::served::ChainImage;
use fathom_units::redacted;

/// The first and the last of these images.
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

/// The job waits for requests to one of these images. Until they are answered, the images must not be used by another
/// job: a late write would land on what that job has written.
pub fn error(images: &str) -> RequestError {
    ErrorKind::Late.because(format!(
        "stopping: the storage of {images} does not respond; the job ends when that storage \
         responds, and the disk is unchanged"
    ))
}
