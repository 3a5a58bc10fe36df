//! `fathom img resize`: disks of other sizes.
//!
//! What a larger disk has more reads as zeroes, whatever was there before and whatever is below
//! it. (But for LUKS images: it reads as anything, as on a disk that nobody has written to.) The size changes last, by one write of one sector (or, of a raw image, by the file's
//! length): a power cut leaves the old disk or the new one.

mod growth;
mod luks;
mod qcow2;
mod qed;
mod raw;

use super::create::{Preallocation, check_preallocation};
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// The disk of the backing file. What it has behind the end of the disk above it must not come
/// into sight when that grows.
pub trait Below {
    /// Its size in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset` on; all of it is within the disk.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()>;
}

/// What a disk is to be.
#[derive(Clone, Copy)]
pub struct Resize<'a> {
    /// In bytes; the caller has found out that the user knows of a loss.
    pub size: u64,
    /// How what is new is allocated.
    pub preallocation: Preallocation,
    /// The external data file, where the image has one.
    pub data_file: Option<&'a dyn ImageFile>,
    /// The backing file, where there is one.
    pub below: Option<&'a dyn Below>,
}

/// Resizes the disk of an image in `file`.
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
