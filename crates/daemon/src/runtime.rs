//! The directory for sockets that is fathom's to make.

use fathom_client::place;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// Make that directory if it is where `path` is to be. Any other directory is
/// the user's: one that is not there is more likely misspelt.
///
/// Everybody may go through it, whatever the umask: who may connect is said of
/// each socket.
pub fn make_parent_of(path: &Path) -> io::Result<()> {
    let Some(dir) = place::runtime_dir().filter(|dir| path.parent() == Some(dir)) else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o755).create(&dir) {
        Ok(()) => set_permissions(&dir, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
