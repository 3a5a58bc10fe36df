//! `fathom img create`: new images, with the options of `qemu-img create`.

mod choice;
mod encryption;
mod options;
mod space;

pub use crate::qcow2::Contents;
pub use encryption::Encryption;
pub(crate) use encryption::{NAMES as LUKS_NAMES, PREFIX as ENCRYPTION_PREFIX};
pub use options::{Backing, Options, Preallocation, Qcow2Options};
pub(crate) use space::{NewImage, check_preallocation, empty, preallocate};

use super::Image;
use crate::drivers::driver;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use fathom_luks::Passphrase;
use std::fmt;
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
    driver(options.format).create(&NewImage {
        file,
        data_file,
        options,
        size,
        key,
    })
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
    driver(options.format).reads_as_zeroes(options, store.grows())
}

impl Options {
    /// Returns the names of a format's options.
    pub fn names(format: Format) -> &'static [&'static str] {
        driver(format).option_names()
    }

    /// Validates everything that does not depend on the disk's size.
    pub fn validate(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::usage(problem));
        if let Some(backing) = &self.backing {
            let len = backing.name.len();
            if len == 0 {
                return refuse("backing_fmt needs backing_file");
            }
            if len > 1023 || backing.name.contains('\0') {
                return refuse("the backing file's name is invalid, or exceeds 1023 bytes");
            }
        }
        driver(self.format).validate(self)
    }
}

/// Formats the options as `qemu-img create` does.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fmt={}", self.format)?;
        for name in driver(self.format).printed_options() {
            if let Some(value) = self.shown(name) {
                write!(f, " {name}={value}")?;
            }
        }
        Ok(())
    }
}
