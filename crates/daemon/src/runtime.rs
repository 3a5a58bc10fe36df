//! The directory for sockets that is fathom's to make.

use rustix::process::geteuid;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// /run/fathom for root, else $XDG_RUNTIME_DIR/fathom. None where there is no
/// such directory.
pub fn dir() -> Option<PathBuf> {
    let run = if geteuid().is_root() {
        PathBuf::from("/run")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?)
    };
    Some(run.join("fathom"))
}

/// Make that directory if it is where `path` is to be. Any other directory is
/// the user's: one that is not there is more likely misspelt.
///
/// Everybody may go through it, whatever the umask: who may connect is said of
/// each socket.
pub fn make_parent_of(path: &Path) -> io::Result<()> {
    let Some(dir) = dir().filter(|dir| path.parent() == Some(dir)) else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o755).create(&dir) {
        Ok(()) => set_permissions(&dir, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
