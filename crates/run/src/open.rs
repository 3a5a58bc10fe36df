//! Opening the files of a run, which may come from anywhere.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file to read it.
///
/// # Errors
/// When there is none: a FIFO, say, in whose place somebody would be waited for.
pub fn open_file(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::new(ErrorKind::InvalidInput, "not a regular file")),
    }
}
