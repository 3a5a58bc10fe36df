//! Opening and writing the files of a run, which may come from anywhere.

use std::fs::{self, File};
use std::io::{self, Error, ErrorKind, Result, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, open, openat};
use rustix::io::Errno;
use serde::Serialize;

/// What makes a folder a run directory.
pub(crate) const RUN: &str = "run.json";
/// Of it: a disk's map of a million extents takes a quarter of that.
pub(crate) const MAX_RUN: u64 = 512 << 20;
/// Of a file of events: what a sparse file claims to hold would be read, or copied, for days.
pub(crate) const MAX_EVENTS: u64 = 16 << 30;

/// Whether it names something within a folder.
pub(crate) fn is_name(text: &str) -> bool {
    !matches!(text, "" | "." | "..") && !text.contains(['/', '\0'])
}

/// Opens a file of at most `most` bytes to read it, by the names of its folders from the run's
/// directory on and its own.
///
/// # Errors
/// When it is not a regular file of that directory: a FIFO, say, in whose place somebody would be
/// waited for, or a symbolic link, which leads to whatever its maker likes. Or when it is too large.
pub(crate) fn open_within(dir: &Path, folders: &[&str], file: &str, most: u64) -> Result<File> {
    let as_folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // The directory itself was named by the user.
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

/// Writes JSON in place of a file: the old one is there until the new one is whole and durable.
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
