//! Resizes raw images: changes the file's length.

use crate::offline::create::{Preallocation, preallocate};
use crate::offline::resize::{Resize, sync};
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(crate) fn resize(file: &dyn ImageFile, to: &Resize) -> Result<()> {
    if to.preallocation == Preallocation::Metadata {
        return Err(Error::usage(
            "preallocation=metadata: raw images have no metadata; use falloc or full",
        ));
    }
    let old = file.len().map_err(Error::io("cannot read its size"))?;
    let resized = file
        .set_len(to.size)
        .map_err(Error::io("cannot resize the file"))
        .and_then(|()| {
            let more = to.size.saturating_sub(old);
            preallocate(file, to.preallocation, old, more)
        })
        .and_then(|()| sync(file));
    if resized.is_err() && to.size > old {
        // The first error is more useful than one of this call.
        let _ = file.set_len(old);
    }
    resized
}
