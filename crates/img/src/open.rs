//! Opening what a tool writes to.

use crate::error::{Error, io_error, usage};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

pub(crate) fn refuse_same(
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

pub(crate) fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

pub(crate) fn identity_of(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// What a file system lacks for `needed` bytes of a file; what it has left counts, as far as anybody
/// may use it.
pub(crate) fn missing(file: &File, needed: u64) -> u64 {
    let left = rustix::fs::fstatvfs(file).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    needed.saturating_sub(left)
}

/// Opens what is to be written, or makes it: also whether that was made.
pub(crate) fn open_target(path: &Path) -> Result<(File, bool), Error> {
    let is_new = !path.exists();
    Ok((open_writable(path, true)?, is_new))
}

/// Opens a regular file or a block device for writing, as it is.
pub(crate) fn open_writable(path: &Path, create: bool) -> Result<File, Error> {
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
