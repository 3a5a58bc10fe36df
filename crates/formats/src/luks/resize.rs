//! Resizes LUKS images: changes the file's length.

use crate::offline::create::Preallocation;
use crate::offline::resize::Resize;
use crate::{Error, Result, raw};
use fathom_files::ImageFile;
use fathom_luks::Header;

pub(super) fn resize(file: &dyn ImageFile, header: &Header, to: &Resize) -> Result<()> {
    let payload = header.payload();
    if payload.size.is_some() {
        return Err(Error::unsupported(
            "its header records the disk's size, and only LUKS images without a recorded size \
             can be resized",
        ));
    }
    if to.preallocation != Preallocation::Off {
        return Err(Error::usage(
            "preallocation: not possible for luks images, because preallocated data would read \
             as random bytes",
        ));
    }
    let sector = u64::from(payload.sector_size);
    if !to.size.is_multiple_of(sector) {
        return Err(Error::usage(format!(
            "the new size is not a multiple of the sector size of {sector} bytes"
        )));
    }
    let size = to.size.checked_add(payload.offset);
    let size = size.ok_or_else(|| Error::usage("the size exceeds the limit"))?;
    raw::resize(file, &Resize { size, ..*to })
}
