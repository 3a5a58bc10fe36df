//! The directory for sockets that Fathom creates.

use rustix::process::geteuid;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Returns the directory: /run/fathom for root, else $XDG_RUNTIME_DIR/fathom. None: XDG_RUNTIME_DIR
/// is not set.
pub fn runtime_dir() -> Option<PathBuf> {
    let run = if geteuid().is_root() {
        PathBuf::from("/run")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?)
    };
    Some(run.join("fathom"))
}

/// Creates the parent of `path`, if it is [`runtime_dir`] and does not exist. Any other directory
/// belongs to the user: a missing one is more likely misspelled.
///
/// All users may pass through the directory, independent of the umask. Each socket has its own
/// permissions.
pub fn make_parent_of(path: &Path) -> io::Result<()> {
    let Some(dir) = runtime_dir().filter(|dir| path.parent() == Some(dir)) else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o755).create(&dir) {
        Ok(()) => set_permissions(&dir, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
