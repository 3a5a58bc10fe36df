//! The backing file's name in QED images.

use super::image::QedImage;
use super::{FEATURE_BACKING_FILE, FEATURE_BACKING_FORMAT_NO_PROBE, Header};
use crate::offline::new_backing::NewBacking;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// Sets or removes the name. The last write replaces the header's sector.
pub(super) fn set(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    let mut header = QedImage::read(file)?.header;
    let failed = |source| Error::Io {
        what: "cannot write its header",
        source,
    };
    let old = header.backing_range();
    header.features &= !(FEATURE_BACKING_FILE | FEATURE_BACKING_FORMAT_NO_PROBE);
    (header.backing_offset, header.backing_len) = (0, 0);
    if let Some(backing) = backing {
        let at = free_place(&header, old, backing.name.len())?;
        file.write_at(backing.name, at).map_err(failed)?;
        file.sync().map_err(failed)?;
        header.features |= FEATURE_BACKING_FILE;
        if backing.format == Format::Raw {
            header.features |= FEATURE_BACKING_FORMAT_NO_PROBE;
        }
        header.backing_offset = at as u32;
        header.backing_len = backing.name.len() as u32;
    }
    file.write_at(&header.encode(), 0).map_err(failed)?;
    file.sync().map_err(failed)
}

/// Checks whether [`set`] could store `backing`.
pub(super) fn check(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    let header = QedImage::read(file)?.header;
    match backing {
        Some(backing) => free_place(&header, header.backing_range(), backing.name.len()).map(drop),
        None => Ok(()),
    }
}

/// Finds a place for a name of `len` bytes in the header's clusters, which have at least 4 KiB. The
/// place does not overlap the old name.
fn free_place(header: &Header, old: Option<(u64, usize)>, len: usize) -> Result<u64> {
    let is_free = |at: &u64| {
        let end = at + len as u64;
        let apart = old.is_none_or(|(start, len)| end <= start || start + len as u64 <= *at);
        apart && end <= header.header_bytes()
    };
    let places = [512, 512 + 1024, 512 + 2048];
    let place = places.into_iter().find(is_free);
    place.ok_or_else(|| Error::unsupported("its header has no space for another name"))
}
