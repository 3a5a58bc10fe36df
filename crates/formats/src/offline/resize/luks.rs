//! LUKS images: the file's length.

use super::{Resize, raw};
use crate::offline::Image;
use crate::offline::create::Preallocation;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

pub(super) fn resize(file: &dyn ImageFile, to: &Resize) -> Result<()> {
    let Image::Luks(header, _) = Image::read(file, Format::Luks)? else {
        unreachable!("it was read as one");
    };
    let payload = header.payload();
    if payload.size.is_some() {
        return Err(Error::unsupported(
            "its header says which size the disk has: LUKS images are resized where that is what the file has",
        ));
    }
    if to.preallocation != Preallocation::Off {
        return Err(Error::usage(
            "luks images are not preallocated: what is new reads as anything",
        ));
    }
    let sector = u64::from(payload.sector_size);
    if !to.size.is_multiple_of(sector) {
        return Err(Error::usage(format!(
            "the new size must be a multiple of the sector size, {sector} bytes"
        )));
    }
    let size = to.size.checked_add(payload.offset);
    let size = size.ok_or_else(|| Error::usage("the size is too large"))?;
    raw::resize(file, &Resize { size, ..*to })
}
