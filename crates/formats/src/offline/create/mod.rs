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

/// Creates an image of a disk of `size` bytes, rounded up to whole sectors, in `file`, whose
/// contents are lost. Guest data is in `data_file` if the options name a data file, and is
/// encrypted with `key` if they ask for encryption. The header is written last, after a flush, so
/// that a file or device left by a crash is not an image.
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

/// Empties the file. On a device, whose size cannot be set to 0, erases the header of an old image.
pub(super) fn empty(file: &dyn ImageFile) -> Result<()> {
    const HEADER: usize = 4096;
    if file.grows() {
        return file.set_len(0).map_err(Error::io("cannot write the image"));
    }
    let len = file.len().map_err(Error::io("cannot get the size"))?;
    let len = len.min(HEADER as u64) as usize;
    let erased = file.write_at(&ZEROES[..len], 0).and_then(|()| file.sync());
    erased.map_err(Error::io("cannot erase the old header"))
}

/// Returns the size of the disk in a backing file, which is the default size of a new image. The
/// options must name the format of the backing file. `path` is the backing file's path.
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

/// Whether a disk that [`create`] has just created with these options and files reads as zeroes,
/// apart from the contents of its backing file. If `false`, the disk may read as the former
/// contents of a device.
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
        // Sectors that were never written decrypt to arbitrary bytes.
        Format::Luks | Format::Foreign(_) => false,
    }
}

/// Refuses `preallocation=falloc` if the file cannot allocate space.
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

/// A buffer of zeroes for writing.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Allocates space for `len` bytes from `offset` on, as `how` says. The bytes already read as
/// zeroes, except where [`Preallocation::Full`] writes zeroes.
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
