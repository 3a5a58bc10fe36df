//! Finds servers: each has an entry, named by its process id, in a directory of its user. The entry
//! is the server's socket, or a symbolic link to it.

use fathom_sockets::runtime_dir;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Returns the path of the entry of a server. `runtime_dir`: the [`runtime_dir`] of the server's
/// user.
pub fn entry_in(runtime_dir: &Path, pid: u32) -> PathBuf {
    runtime_dir.join("control").join(format!("{pid}.sock"))
}

/// Returns the path of the entry of a server of this user.
pub fn entry_of(pid: u32) -> Option<PathBuf> {
    Some(entry_in(&runtime_dir()?, pid))
}

/// Returns the process id that an entry is named after.
pub fn pid_of(entry: &Path) -> Option<u32> {
    let name = entry.file_name().and_then(OsStr::to_str);
    name?.strip_suffix(".sock")?.parse().ok()
}

/// Returns the process ids and entries of this user's servers. Some of these may have ended.
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
