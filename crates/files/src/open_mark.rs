//! Marks of image files that a writer has opened and not yet closed.
//!
//! A writer sets the mark when it takes an image into use, and removes it after it has written everything back. A mark
//! that the next writer finds means that the writer before was killed, or that the host lost power: clusters of the
//! image may be leaked. The mark stays until a repair has given leaked clusters back. Marks are extended attributes;
//! what cannot have any (a block device, files of some file systems) is never marked.

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::fs::File;
use std::io;

/// Name of the extended attribute.
pub const ATTRIBUTE: &str = "user.fathom.open";

/// What it says; its presence is what counts.
const VALUE: &[u8] = b"1";

/// Whether the file is marked. False when that cannot be told.
pub(crate) fn is_set(file: &File) -> bool {
    let mut value = [0; VALUE.len()];
    let read = fgetxattr(file, ATTRIBUTE, &mut value[..]);
    matches!(read, Ok(_) | Err(Errno::RANGE))
}

/// Marks the file. A power cut may take the mark away again: leaks of that kill are not known then.
pub(crate) fn set(file: &File) -> io::Result<()> {
    Ok(fsetxattr(file, ATTRIBUTE, VALUE, XattrFlags::empty())?)
}

/// Removes the mark, if there is one.
pub(crate) fn clear(file: &File) -> io::Result<()> {
    match fremovexattr(file, ATTRIBUTE) {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
