//! Marks of image files that a writer has opened and not yet closed.
//!
//! A writer sets the mark when it opens an image, and removes the mark after it has written
//! everything back. If the next writer finds the mark, its predecessor was killed or the host lost
//! power, and the image may have leaked clusters. The mark stays until a repair has freed the
//! leaked clusters.
//!
//! Marks are extended attributes. Files that cannot have them (block devices, files of some file
//! systems) are never marked.

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::fs::File;
use std::io;

/// Name of the extended attribute that marks an open image.
pub const ATTRIBUTE: &str = "user.fathom.open";

/// Value of the attribute; only the attribute's presence counts.
const VALUE: &[u8] = b"1";

/// Returns whether the file is marked. Returns false if that is unknown.
pub(crate) fn is_set(file: &File) -> bool {
    let mut value = [0; VALUE.len()];
    let read = fgetxattr(file, ATTRIBUTE, &mut value[..]);
    matches!(read, Ok(_) | Err(Errno::RANGE))
}

/// Marks the file. A power failure may undo the mark, and leaks are then not detected.
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
