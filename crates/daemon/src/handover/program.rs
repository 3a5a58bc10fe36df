//! Which program a successor is.

use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file that is now where this process was started from.
pub fn own_binary() -> io::Result<PathBuf> {
    let path = fs::read_link("/proc/self/exe")?.into_os_string().into_vec();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
    Ok(std::ffi::OsStr::from_bytes(path).into())
}

/// Refuse a program that somebody else could have made. Those whom a group lets use the API may not
/// have anything run.
pub fn check_binary(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(format!("{shown}: give the whole path of the program"));
    }
    let meta = fs::metadata(path).map_err(|error| format!("{shown}: {error}"))?;
    let own = rustix::process::geteuid().as_raw();
    let is_ours = [0, own].contains(&meta.uid()) && meta.mode() & 0o002 == 0;
    match is_ours && meta.is_file() {
        true => Ok(()),
        false => Err(format!(
            "{shown}: a successor is a file of root's or of the server's user that others cannot \
             write to"
        )),
    }
}
