//! The offline tools on images: opening and locking for what
//! [`fathom_formats::img`] does.

pub use fathom_formats::img::check::{Options as CheckOptions, Repair, Report};
pub use fathom_formats::img::create::{Backing, Options as CreateOptions};
pub use fathom_formats::img::info::Info;
pub use fathom_formats::img::{Format, Image};

use fathom_core::DiskError;
use fathom_formats::img::{check as checks, create as creation, info as infos};
use fathom_formats::img::{open_read_only, resolve};
use fathom_formats::{Error as FormatError, ImageFile};
use fathom_storage::lock_image;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Why a tool did not do its work; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image or the options are wrong.
    #[error("{}: {source}", path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// There is nothing to check.
    #[error("{}: raw images have no metadata that could be checked", path.display())]
    Raw {
        /// The image.
        path: PathBuf,
    },
    /// The image is in use.
    #[error(transparent)]
    Locked(#[from] DiskError),
}

fn of(path: &Path) -> impl Fn(FormatError) -> Error {
    let path = path.to_owned();
    move |source| Error::Format {
        path: path.clone(),
        source,
    }
}

fn io_error(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Error {
    let told = of(path);
    move |source| told(FormatError::Io { what, source })
}

fn usage(path: &Path, problem: impl Into<String>) -> Error {
    of(path)(FormatError::Usage(problem.into()))
}

/// Describes an image, or with `chain` it and all below it. `format` `None`
/// means to look at the image. `force_share` reads it even while others write.
pub fn info(
    path: &Path,
    format: Option<Format>,
    chain: bool,
    force_share: bool,
) -> Result<Vec<Info>, Error> {
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    if !force_share {
        lock_image(path, &file, false)?;
    }
    let infos = match chain {
        true => infos::chain(path, &file, format),
        false => Info::read(path, &file, format).map(|info| vec![info]),
    };
    infos.map_err(of(path))
}

/// Checks an image, and repairs it if the options say so. `say` gets a line
/// for each problem.
pub fn check(
    path: &Path,
    format: Option<Format>,
    options: &CheckOptions,
    force_share: bool,
    say: &mut dyn FnMut(&str),
) -> Result<(Format, Report), Error> {
    let writes = options.repair != Repair::Nothing;
    let file = match writes {
        true => open_writable(path, false)?,
        false => open_read_only(path).map_err(io_error(path, "cannot be opened"))?,
    };
    if writes || !force_share {
        lock_image(path, &file, writes)?;
    }
    let format = match format {
        Some(format) => format,
        None => Format::probe(&file).map_err(of(path))?,
    };
    if format == Format::Raw {
        let path = path.to_owned();
        return Err(Error::Raw { path });
    }
    let report = checks::check(&file, format, options, say).map_err(of(path))?;
    Ok((format, report))
}

/// Makes an image. Its size is that of the backing file where none is given,
/// and goes into the options; `unsafe_backing` does without looking at the
/// backing file. Returns the size.
///
/// What the file had in it is lost, unless something is wrong with the
/// options. A file that was not there is not left behind after a failure.
pub fn create(path: &Path, options: &CreateOptions, unsafe_backing: bool) -> Result<u64, Error> {
    options.validate().map_err(of(path))?;
    let size = size_of(path, options, unsafe_backing)?;
    let below = match &options.backing {
        Some(backing) => identity_of(&resolve(path, backing.name.as_bytes()).map_err(of(path))?),
        None => None,
    };
    let (file, is_new) = open_target(path)?;
    let made = (|| {
        let same = "is the new image's backing file, too: choose another name";
        refuse_same(path, &file, below, same)?;
        lock_image(path, &file, true)?;
        let data = open_data_file(path, &file, options, below)?;
        let data = data.as_ref().map(|d| d as &dyn ImageFile);
        creation::create(&file, data, options, size).map_err(of(path))
    })();
    if made.is_err() && is_new {
        // The error that there is says more than one about this would.
        let _ = std::fs::remove_file(path);
    }
    made.map(|()| size)
}

fn size_of(path: &Path, options: &CreateOptions, unsafe_backing: bool) -> Result<u64, Error> {
    let backing = match &options.backing {
        Some(backing) if !unsafe_backing => {
            Some(creation::backing_size(path, backing).map_err(of(path))?)
        }
        _ => None,
    };
    let size = options.size.or(backing);
    size.ok_or_else(|| usage(path, "a new image needs a size, such as 10G"))
}

fn open_data_file(
    image: &Path,
    image_file: &File,
    options: &CreateOptions,
    below: Option<(u64, u64)>,
) -> Result<Option<File>, Error> {
    let Some(name) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let path = resolve(image, name.as_bytes()).map_err(of(image))?;
    let (file, _) = open_target(&path)?;
    let own = identity(image_file).ok();
    refuse_same(&path, &file, own, "is the new image itself, too")?;
    refuse_same(&path, &file, below, "is the new image's backing file, too")?;
    lock_image(&path, &file, true)?;
    Ok(Some(file))
}

fn refuse_same(
    path: &Path,
    file: &File,
    other: Option<(u64, u64)>,
    problem: &str,
) -> Result<(), Error> {
    match other.is_some() && identity(file).ok() == other {
        true => Err(usage(path, problem)),
        false => Ok(()),
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Opens what is to be written, or makes it: also whether that was made.
fn open_target(path: &Path) -> Result<(File, bool), Error> {
    let is_new = !path.exists();
    Ok((open_writable(path, true)?, is_new))
}

/// Opens a regular file or a block device for writing, as it is.
fn open_writable(path: &Path, create: bool) -> Result<File, Error> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(io_error(path, "cannot be opened for writing"))?;
    let kind = file
        .metadata()
        .map_err(io_error(path, "cannot be examined"))?
        .file_type();
    match kind.is_file() || kind.is_block_device() {
        true => Ok(file),
        false => Err(usage(path, "is not a regular file or a block device")),
    }
}
