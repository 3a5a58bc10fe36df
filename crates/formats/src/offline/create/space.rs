//! A new image's files and their space.

use super::{Options, Preallocation};
use crate::{Error, Result};
use fathom_files::ImageFile;
use fathom_luks::Passphrase;
use fathom_units::cause;

/// An image to create.
pub(crate) struct NewImage<'a> {
    /// The file of the image, whose contents are lost.
    pub(crate) file: &'a dyn ImageFile,
    /// The external data file, if the options name one.
    pub(crate) data_file: Option<&'a dyn ImageFile>,
    pub(crate) options: &'a Options,
    /// Size of the disk in bytes, in whole sectors.
    pub(crate) size: u64,
    /// The key that unlocks the image, if it will be encrypted.
    pub(crate) key: Option<&'a Passphrase>,
}

/// Empties the file. On a device, whose size cannot be set to 0, erases the header of an old image.
pub(crate) fn empty(file: &dyn ImageFile) -> Result<()> {
    const HEADER: usize = 4096;
    if file.grows() {
        return file.set_len(0).map_err(Error::io("cannot write the image"));
    }
    let len = file.len().map_err(Error::io("cannot get the size"))?;
    let len = len.min(HEADER as u64) as usize;
    let erased = file.write_at(&ZEROES[..len], 0).and_then(|()| file.sync());
    erased.map_err(Error::io("cannot erase the old header"))
}

/// Refuses `preallocation=falloc` if the file cannot allocate space.
pub(crate) fn check_preallocation(file: &dyn ImageFile, how: Preallocation) -> Result<()> {
    if how != Preallocation::Falloc {
        return Ok(());
    }
    file.check_allocate().map_err(|error| {
        Error::Unsupported(format!(
            "preallocation=falloc: {}; use preallocation=full, which writes zeroes, or off",
            cause(error)
        ))
    })
}

/// A buffer of zeroes for writing.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Allocates space for `len` bytes from `offset` on, as `how` says. The bytes already read as
/// zeroes, except where [`Preallocation::Full`] writes zeroes.
pub(crate) fn preallocate(
    file: &dyn ImageFile,
    how: Preallocation,
    offset: u64,
    len: u64,
) -> Result<()> {
    let no_space = Error::io("cannot allocate space");
    match how {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => file.allocate(offset, len).map_err(no_space),
        Preallocation::Full => {
            let mut at = offset;
            while at < offset + len {
                let piece = (offset + len - at).min(ZEROES.len() as u64);
                let written = file.write_at(&ZEROES[..piece as usize], at);
                written.map_err(Error::io("cannot allocate space"))?;
                at += piece;
            }
            Ok(())
        }
    }
}
