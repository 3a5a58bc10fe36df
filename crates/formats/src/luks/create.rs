//! Creates LUKS images: a header with key slots, and space for the disk.

use crate::offline::create::NewImage;
use crate::{Error, Result};

/// Size in bytes of the first sector, which holds the magic number.
const MAGIC_SECTOR: usize = 512;

/// Creates a LUKS image. The disk reads as arbitrary bytes, like a disk that was never written to.
pub(super) fn create(new: &NewImage) -> Result<()> {
    let (file, options, size) = (new.file, new.options, new.size);
    let sector = u64::from(options.encryption.luks.sector_size);
    if !size.is_multiple_of(sector) {
        return Err(Error::usage(format!(
            "the size is not a multiple of the sector size of {sector} bytes"
        )));
    }
    let header = options.encryption.header(new.key)?;
    let failed = || Error::io("cannot write the image");
    file.set_len(0).map_err(failed())?;
    file.set_len(header.len() as u64 + size)
        .map_err(Error::io("cannot extend the file"))?;
    let (first, rest) = header.split_at(MAGIC_SECTOR);
    file.write_at(&[0; MAGIC_SECTOR], 0).map_err(failed())?;
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(rest, MAGIC_SECTOR as u64).map_err(failed())?;
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(first, 0).map_err(failed())?;
    file.sync().map_err(Error::io("cannot flush"))
}
