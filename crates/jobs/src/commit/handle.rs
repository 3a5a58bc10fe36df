//! Starts a commit job.

use super::committer::Committer;
use super::terms::Terms;
use crate::following::{Following, Shared, Tell};
use crate::source::Source;
use fathom_core::{Disk, DiskError, ThreadKind, thread_starts};
use fathom_formats::served::ImageDisk;
use fathom_units::cause;
use std::sync::Arc;

/// Starts a job that copies the data of intermediate images into the image below them.
///
/// `image` is the source's own image, with two side views: the job reads one, from the middle
/// image on, and writes to the other. At the end the image above the middle gets the lower image
/// as its backing image. `over` is called when the job is over. May block.
///
/// # Errors
/// A message for the user; all images are unchanged.
pub fn start(
    source: Source,
    image: Arc<ImageDisk>,
    terms: Terms,
    tell: Tell,
    over: Box<dyn FnOnce() + Send>,
) -> Result<Following, String> {
    let missing = "the images have no disk of their own";
    let shared = Shared::new(true, terms.rate, &tell);
    let committer = Committer {
        middle: image.reader().ok_or(missing)?,
        below: image.side_view().ok_or(missing)?,
        source,
        image,
        terms,
        shared: shared.clone(),
        tell,
    };
    let disk = &committer.source.disk;
    shared
        .take(disk)
        .map_err(|error: DiskError| error.to_string())?;
    shared.state().status.left = committer.below.info().size;
    let thread = std::thread::Builder::new().name("commit".into());
    let thread = thread.spawn(move || {
        thread_starts(ThreadKind::General);
        committer.run();
        over();
    });
    thread.map_err(|error| format!("cannot start a thread: {}", cause(error)))?;
    Ok(Following { shared })
}
