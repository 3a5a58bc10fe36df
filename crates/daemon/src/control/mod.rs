//! The control socket: JSON lines between `fathom stats` and its like and a
//! running daemon.

mod client;
mod protocol;
mod server;

pub use client::{Client, ClientError};
pub use protocol::{Ask, ConnectionInfo, FrontEnd, Info, NbdInfo, Request, WorkerInfo};
pub(crate) use server::Server;

use crate::runtime;
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::{DirBuilder, symlink_metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Where the daemon with this process id listens unless it was told
/// otherwise: /run/fathom/control/PID.sock for root, else
/// $XDG_RUNTIME_DIR/fathom/control/PID.sock. None where there is no such
/// directory.
pub fn default_path(pid: u32) -> Option<PathBuf> {
    Some(runtime::dir()?.join("control").join(format!("{pid}.sock")))
}

/// The daemons of this user that have a default control socket, with that; some may have been killed.
pub fn all() -> Vec<(u32, PathBuf)> {
    let dir = runtime::dir().map(|dir| dir.join("control"));
    let entries = dir.and_then(|dir| std::fs::read_dir(dir).ok());
    let paths = entries.into_iter().flatten().flatten();
    let mut all: Vec<_> = paths
        .map(|entry| entry.path())
        .filter_map(|path| Some((pid_of(&path)?, path)))
        .collect();
    all.sort_unstable();
    all
}

/// Of a default control socket.
fn pid_of(path: &Path) -> Option<u32> {
    let name = path.file_name().and_then(OsStr::to_str);
    name?.strip_suffix(".sock")?.parse().ok()
}

/// Make the directory of a default control socket, for its owner only.
fn make_private_dir(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        other => return other,
    }
    let metadata = symlink_metadata(dir)?;
    let owned = metadata.is_dir() && metadata.uid() == geteuid().as_raw();
    if owned && metadata.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(
        "not a directory that only its owner may use",
    ))
}

/// Remove the sockets of daemons that were killed: those named after a
/// process that does not exist, at which nobody listens.
fn remove_stale(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_dead = |pid| !Path::new("/proc").join(format!("{pid}")).exists();
        if pid_of(&path).is_some_and(is_dead)
            && UnixStream::connect(&path)
                .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        {
            // Another daemon that starts may have done it.
            let _ = std::fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_sockets_of_killed_daemons_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // No process has so great an id (PID_MAX_LIMIT is 2^22).
        let dead = dir.path().join("4999999.sock");
        let elsewhere = dir.path().join("4999998.sock");
        let own = dir.path().join(format!("{}.sock", std::process::id()));
        let other = dir.path().join("other.sock");
        let _live = UnixListener::bind(&elsewhere).unwrap();
        for path in [&dead, &own, &other] {
            drop(UnixListener::bind(path).unwrap());
        }
        remove_stale(dir.path());
        assert!(!dead.exists());
        assert!([elsewhere, own, other].iter().all(|path| path.exists()));
    }

    #[test]
    fn only_private_directories_are_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fathom");
        make_private_dir(&path).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().mode() & 0o777, 0o700);
        make_private_dir(&path).unwrap();
        let open = std::fs::Permissions::from_mode(0o750);
        std::fs::set_permissions(&path, open).unwrap();
        assert!(make_private_dir(&path).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(make_private_dir(&link).is_err());
    }
}
