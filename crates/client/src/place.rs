//! Where servers are found: each has an entry in a directory of its user's, by its process id. That
//! is its socket, or a symbolic link to it.

use rustix::process::geteuid;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The directory for sockets that is fathom's to make: /run/fathom for root, else
/// $XDG_RUNTIME_DIR/fathom. None where there is no such place.
pub fn runtime_dir() -> Option<PathBuf> {
    let run = if geteuid().is_root() {
        PathBuf::from("/run")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?)
    };
    Some(run.join("fathom"))
}

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
