//! Creates raw images, which are only space.

use crate::offline::create::{Preallocation, check_preallocation, preallocate};
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(super) fn create(file: &dyn ImageFile, how: Preallocation, size: u64) -> Result<()> {
    check_preallocation(file, how)?;
    let failed = Error::io("cannot write the image");
    file.set_len(0).map_err(failed)?;
    file.set_len(size)
        .map_err(Error::io("cannot extend the file"))?;
    preallocate(file, how, 0, size)?;
    file.sync().map_err(Error::io("cannot flush"))
}
