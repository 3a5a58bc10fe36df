//! Marks bitmaps that will miss writes.

use crate::offline::info::read_bitmaps;
use crate::qcow2::Header;
use crate::qcow2::bitmap::{FLAG_AUTO, FLAG_IN_USE};
use crate::{Error, Result};
use fathom_files::ImageFile;

/// Byte offset of the flags in a directory entry.
const FLAGS_AT: u64 = 12;

/// Marks the enabled bitmaps of an image as in use, permanently: a bitmap found with this flag is
/// not valid. Disabled bitmaps stay valid, because they need not record writes. Changes nothing
/// else. Each flag is within one sector, and the flags are durable when this function returns.
/// Returns the number of bitmaps that were valid until now.
pub(crate) fn mark_unrecorded(file: &dyn ImageFile, header: &Header) -> Result<usize> {
    let Some(extension) = header.bitmaps() else {
        return Ok(0);
    };
    let (mut at, mut marked) = (extension.directory_offset, 0);
    let failed = |error| Error::io("cannot write its bitmap directory")(error);
    for bitmap in read_bitmaps(file, header)? {
        if bitmap.flags & (FLAG_AUTO | FLAG_IN_USE) == FLAG_AUTO {
            let flags = bitmap.flags | FLAG_IN_USE;
            let written = file.write_at(&flags.to_be_bytes(), (at + FLAGS_AT).0);
            written.map_err(failed)?;
            marked += 1;
        }
        at += bitmap.encoded_len();
    }
    if marked > 0 {
        file.sync().map_err(failed)?;
    }
    Ok(marked)
}
