//! The terms of a resize, for the drivers of all formats.

use crate::offline::create::Preallocation;
use crate::{Error, Result};
use fathom_files::ImageFile;

/// The disk of the backing file. Growing the top disk must not expose what the backing disk has
/// beyond the old end.
pub trait Below {
    /// Size of the disk in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset` on. The whole range is within the disk.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()>;
}

/// The new size of a disk and how to reach it.
#[derive(Clone, Copy)]
pub struct Resize<'a> {
    /// New size in bytes. The caller has confirmed with the user that data may be lost.
    pub size: u64,
    /// Preallocation of the new part.
    pub preallocation: Preallocation,
    /// The external data file, if the image has one.
    pub data_file: Option<&'a dyn ImageFile>,
    /// The backing file's disk, if the image has one.
    pub below: Option<&'a dyn Below>,
}

/// Checks that a disk of that size in bytes has whole sectors.
pub(crate) fn whole_sectors(size: u64) -> Result<()> {
    match size.is_multiple_of(512) {
        true => Ok(()),
        false => Err(Error::usage("the new size is not a multiple of 512")),
    }
}

/// Flushes the file.
pub(crate) fn sync(file: &dyn ImageFile) -> Result<()> {
    file.sync().map_err(Error::io("cannot flush"))
}
