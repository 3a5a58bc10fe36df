//! Where servers are found: each has an entry in a directory of its user's, by its process id. That
//! is its socket, or a symbolic link to it.

use fathom_sockets::runtime_dir;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The entry of the server with this process id, by its user's [`runtime_dir`].
pub fn entry_in(runtime_dir: &Path, pid: u32) -> PathBuf {
    runtime_dir.join("control").join(format!("{pid}.sock"))
}

/// The same, by this user's.
pub fn entry_of(pid: u32) -> Option<PathBuf> {
    Some(entry_in(&runtime_dir()?, pid))
}

/// The process id that an entry is named after.
pub fn pid_of(entry: &Path) -> Option<u32> {
    let name = entry.file_name().and_then(OsStr::to_str);
    name?.strip_suffix(".sock")?.parse().ok()
}

/// This user's servers; some may have been killed.
pub fn all() -> Vec<(u32, PathBuf)> {
    let dir = entry_of(0).and_then(|entry| std::fs::read_dir(entry.parent()?).ok());
    let entries = dir.into_iter().flatten().flatten();
    let entries = entries.map(|entry| entry.path());
    let mut all: Vec<_> = entries
        .filter_map(|path| Some((pid_of(&path)?, path)))
        .collect();
    all.sort_unstable();
    all
}
