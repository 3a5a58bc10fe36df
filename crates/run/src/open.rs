//! Opening the files of a run, which may come from anywhere.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, open, openat};
use rustix::io::Errno;

/// Of a file of events: what a sparse file claims to hold would be read, or copied, for days.
pub(crate) const MAX_EVENTS: u64 = 16 << 30;

/// Opens a file to read it, by its folder's name in the run's directory and its own.
///
/// # Errors
/// When it is not a regular file of that directory: a FIFO, say, in whose place somebody would be
/// waited for, or a symbolic link, which leads to whatever its maker likes. Or when it is too large.
pub(crate) fn open_within(dir: &Path, folder: &str, file: &str) -> Result<File> {
    let as_folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // The directory itself was named by the user.
    let dir = open(dir, as_folder, Mode::empty())?;
    let folder = openat(dir, folder, as_folder | OFlags::NOFOLLOW, Mode::empty());
    let folder = folder.map_err(|error| match error {
        Errno::NOTDIR | Errno::LOOP => Error::new(
            ErrorKind::InvalidInput,
            "its folder is no folder, or a symbolic link",
        ),
        other => other.into(),
    })?;
    open_regular(&folder, file.as_ref(), MAX_EVENTS)
}

/// Opens a file of at most so many bytes to read it.
///
/// # Errors
/// When it is larger, or not a regular file.
pub(crate) fn open_file(path: &Path, most: u64) -> Result<File> {
    open_regular(CWD, path, most)
}

fn open_regular(folder: impl AsFd, file: &Path, most: u64) -> Result<File> {
    let refused = |why| Err(Error::new(ErrorKind::InvalidInput, why));
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match openat(folder, file, flags | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => return refused("not a regular file, but a symbolic link"),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true if metadata.len() <= most => Ok(file),
        true => refused("too large for a file of a run"),
        false => refused("not a regular file"),
    }
}
