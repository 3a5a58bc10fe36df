//! `fathom img resize`: changes the size of a disk.
//!
//! The new part of a larger disk reads as zeroes, even if the file held data there before or the
//! backing file has data there. In a LUKS image, the new part reads as arbitrary bytes, like a disk
//! that was never written to. The size changes last, by one write of one sector or, in a raw image,
//! by the file's length. After a power cut, the disk has the old size or the new size.

mod terms;

pub use terms::{Below, Resize};
pub(crate) use terms::{sync, whole_sectors};

use super::create::check_preallocation;
use crate::drivers::driver;
use crate::{Format, Result};
use fathom_files::ImageFile;

/// Resizes the disk of the image in `file`.
pub fn resize(file: &dyn ImageFile, format: Format, to: &Resize) -> Result<()> {
    check_preallocation(to.data_file.unwrap_or(file), to.preallocation)?;
    driver(format).resize(file, to)
}
