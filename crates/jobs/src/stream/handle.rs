//! Starts a stream job.

use super::streamer::Streamer;
use super::terms::{Below, Terms};
use crate::following::{Following, Shared, Tell};
use crate::source::{InUse, Source};
use fathom_core::{DiskError, ThreadKind, thread_starts};
use fathom_formats::served::ImageDisk;
use fathom_units::cause;
use std::sync::Arc;

/// Starts a job that copies data of backing images into the source's own `image`.
///
/// `image` has a side view that copies on read. `over` is called when the job is over. May block.
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
    let error = |error: DiskError| error.to_string();
    let side_view = image.side_view();
    let side_view = side_view.ok_or("the image has no disk of its own")?;
    let other = match &terms.below {
        Below::Other { disk, .. } => Some(InUse::new(disk).map_err(error)?),
        Below::Nothing | Below::Own { .. } => None,
    };
    let shared = Shared::new(true, terms.rate, &tell);
    shared.take(&source.disk).map_err(error)?;
    shared.state().status.left = source.disk.info().size;
    let streamer = Streamer {
        source,
        image,
        side_view,
        terms,
        shared: shared.clone(),
        tell,
    };
    let thread = std::thread::Builder::new().name("stream".into());
    let thread = thread.spawn(move || {
        thread_starts(ThreadKind::General);
        streamer.run(other);
        over();
    });
    thread.map_err(|error| format!("cannot start a thread: {}", cause(error)))?;
    Ok(Following { shared })
}
