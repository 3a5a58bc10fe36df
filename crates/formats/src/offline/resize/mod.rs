//! `fathom img resize`: changes the size of a disk.
//!
//! The new part of a larger disk reads as zeroes, even if the file held data there before or the
//! backing file has data there. In a LUKS image, the new part reads as arbitrary bytes, like a disk
//! that was never written to. The size changes last, by one write of one sector or, in a raw image,
//! by the file's length. After a power cut, the disk has the old size or the new size.

mod growth;
mod luks;
mod qcow2;
mod qed;
mod raw;

use super::create::{Preallocation, check_preallocation};
use crate::{Error, Format, Result};
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

/// Resizes the disk of the image in `file`.
pub fn resize(file: &dyn ImageFile, format: Format, to: &Resize) -> Result<()> {
    check_preallocation(to.data_file.unwrap_or(file), to.preallocation)?;
    match format {
        Format::Raw => raw::resize(file, to),
        Format::Luks => luks::resize(file, to),
        Format::Foreign(_) => Err(Error::only_read(format)),
        Format::Qcow2 => qcow2::resize(file, to),
        Format::Qed => qed::resize(file, to),
    }
}

fn whole_sectors(size: u64) -> Result<()> {
    match size.is_multiple_of(512) {
        true => Ok(()),
        false => Err(Error::usage("the new size is not a multiple of 512")),
    }
}

fn sync(file: &dyn ImageFile) -> Result<()> {
    file.sync().map_err(Error::io("cannot flush"))
}
