//! `fathom img create`: new images, with the options of `qemu-img create`.

mod choice;
mod encryption;
mod luks;
mod options;
mod qcow2;
mod qed;
mod raw;
mod stream;

pub use encryption::Encryption;
pub use options::{Backing, Options, Preallocation, Qcow2Options};
pub use qcow2::fully_allocated;
pub use stream::Contents;

use super::Image;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use fathom_luks::Passphrase;
use fathom_units::cause;
use std::path::Path;

/// Makes an image of a disk of `size` bytes (rounded up to whole sectors) in
/// `file`, whose contents are lost, with its guest data in `data_file` if
/// that is among the options, and encrypted by `key` if that is. The header comes last, after a flush: what a
/// crash leaves behind is no image.
pub fn create(
    file: &dyn ImageFile,
    data_file: Option<&dyn ImageFile>,
    options: &Options,
    size: u64,
    key: Option<&Passphrase>,
) -> Result<()> {
    let size = size
        .checked_next_multiple_of(512)
        .filter(|size| *size <= i64::MAX as u64)
        .ok_or_else(|| Error::usage("the size exceeds the limit"))?;
    options.validate()?;
    match options.format {
        Format::Raw => raw::create(file, options.preallocation, size),
        Format::Luks => luks::create(file, options, size, key),
        Format::Foreign(_) => Err(Error::only_read(options.format)),
        Format::Qcow2 => qcow2::create(file, data_file, options, size, key),
        Format::Qed => qed::create(file, options, size),
    }
}

/// The size of the disk in a backing file, which must be of the format that the options say: the
/// size of an image that is given none. `path` is its name.
pub fn backing_size(path: &Path, file: &dyn ImageFile, format: Option<Format>) -> Result<u64> {
    let told = |error: Error| {
        let path = path.display();
        Error::Usage(format!("backing file {path}: {error}"))
    };
    let Some(format) = format else {
        let seems = Format::probe(file).map_err(told)?;
        return Err(told(Error::usage(format!(
            "the format of the backing file is not given; add -F {seems} (the file looks like \
             {seems})"
        ))));
    };
    Ok(Image::read(file, format).map_err(told)?.size())
}

/// Whether a disk that [`create`] has just made with these options and in these files reads as
/// zeroes, apart from what is in its backing file. Where `false`, the disk may read as what a
/// device held before.
pub fn reads_as_zeroes(
    file: &dyn ImageFile,
    data_file: Option<&dyn ImageFile>,
    options: &Options,
) -> bool {
    let store = data_file.unwrap_or(file);
    match options.format {
        Format::Raw => options.preallocation == Preallocation::Full || store.grows(),
        Format::Qcow2 => qcow2::has_no_contents(options) || store.grows(),
        Format::Qed => true,
        // Sectors that were never written decrypt to anything.
        Format::Luks | Format::Foreign(_) => false,
    }
}

/// Refuses `preallocation=falloc` where the file cannot reserve space.
pub(in crate::offline) fn check_preallocation(
    file: &dyn ImageFile,
    how: Preallocation,
) -> Result<()> {
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

/// Zeroes, for writing.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Makes `len` bytes from `offset` on take space as the user wishes; they
/// read as zeroes already.
pub(super) fn preallocate(
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
