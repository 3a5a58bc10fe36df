//! Starting it.

use super::committer::Committer;
use super::terms::Terms;
use crate::following::{Following, Shared, Tell};
use crate::source::Source;
use fathom_core::{Disk, DiskError, ThreadKind, thread_starts};
use fathom_formats::served::ImageDisk;
use fathom_units::cause;
use std::sync::Arc;

/// `image` is the source's own, with two disks beside it: what the one reads, from the image in the middle on, is written to
/// the other one, and the image above the middle gets that below it. `over` hears that it is over. May block. The error is
/// for the user: all is as before.
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
        below: image.beside().ok_or(missing)?,
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
