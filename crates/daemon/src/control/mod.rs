//! The control socket: JSON lines between `fathom stats` and its like and a
//! running daemon.

mod client;
mod protocol;
mod server;

pub use client::{Client, ClientError};
pub use protocol::{FrontEnd, Info, Request, WorkerInfo};
pub(crate) use server::Server;

use rustix::process::geteuid;
use std::fs::{DirBuilder, symlink_metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where the daemon with this process id listens unless it was told
/// otherwise: /run/fathom/PID.sock for root, else
/// $XDG_RUNTIME_DIR/fathom/PID.sock. None where there is no such directory.
pub fn default_path(pid: u32) -> Option<PathBuf> {
    let run = if geteuid().is_root() {
        PathBuf::from("/run")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?)
    };
    Some(run.join("fathom").join(format!("{pid}.sock")))
}

/// The control socket that a user means by a process id or a path.
pub fn path_of(daemon: &str) -> Option<PathBuf> {
    match daemon.parse() {
        Ok(pid) => default_path(pid),
        Err(_) => Some(daemon.into()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_number_is_a_process_and_anything_else_a_path() {
        assert_eq!(path_of("./12"), Some("./12".into()));
        assert_eq!(path_of("12"), default_path(12));
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
