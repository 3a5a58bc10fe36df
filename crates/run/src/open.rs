//! Opens and writes the files of a run, which are not trusted.

use std::fs::{self, File};
use std::io::{self, Error, ErrorKind, Result, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, open, openat};
use rustix::io::Errno;
use serde::Serialize;

/// File that marks a folder as a run directory.
pub(crate) const RUN: &str = "run.json";
/// Maximum size of run.json in bytes; a disk's map of a million extents takes a quarter of it.
pub(crate) const MAX_RUN: u64 = 512 << 20;
/// Maximum size of an event file in bytes. Reading or copying a sparse file of arbitrary size could
/// take days.
pub(crate) const MAX_EVENTS: u64 = 16 << 30;

/// Returns true if `text` is a valid name within a folder.
pub(crate) fn is_name(text: &str) -> bool {
    !matches!(text, "" | "." | "..") && !text.contains(['/', '\0'])
}

/// Opens a file of at most `most` bytes for reading, by the names of its folders from the run
/// directory on and its own name.
///
/// # Errors
/// The file is too large, or is not a regular file of that directory. A FIFO could block the
/// reader, and a symbolic link could lead anywhere.
pub(crate) fn open_within(dir: &Path, folders: &[&str], file: &str, most: u64) -> Result<File> {
    let as_folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // The user named the directory itself, so it may be a symbolic link.
    let mut dir = open(dir, as_folder, Mode::empty())?;
    for &folder in folders {
        let folder = openat(dir, folder, as_folder | OFlags::NOFOLLOW, Mode::empty());
        dir = folder.map_err(|error| match error {
            Errno::NOTDIR | Errno::LOOP => Error::new(
                ErrorKind::InvalidInput,
                "its folder is no folder, or a symbolic link",
            ),
            other => other.into(),
        })?;
    }
    open_regular(&dir, file.as_ref(), most)
}

/// Replaces a file by JSON. The old file stays until the new one is complete and durable.
pub(crate) fn replace(path: &Path, value: &impl Serialize) -> crate::Result<()> {
    let fail = crate::Error::io(path);
    let new = path.with_extension("json.new");
    let text = serde_json::to_string_pretty(value).map_err(|error| fail(io::Error::from(error)))?;
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(fail)
}

/// Opens a file of at most `most` bytes for reading.
///
/// # Errors
/// The file is too large or not a regular file.
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
