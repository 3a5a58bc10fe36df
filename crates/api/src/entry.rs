//! The directory of servers' sockets, in which clients find servers: one entry for each server,
//! named after its process.

use fathom_client::place;
use fathom_sockets::make_parent_of;
use fathom_units::cause;
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, symlink_metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// An entry that is a symbolic link to a socket elsewhere. Dropping it removes the link.
pub struct Entry(pub PathBuf);

impl Entry {
    /// Creates the link. None: that failed, and the server can be reached only by its socket's
    /// path.
    pub fn make(entry: PathBuf, socket: &Path) -> Option<Entry> {
        let made = prepare(&entry).and_then(|()| {
            // (Killed servers leave entries: one with this process's ID, and those that name this
            // socket.)
            if let Err(error) = fs::remove_file(&entry)
                && error.kind() != ErrorKind::NotFound
            {
                return Err(error);
            }
            let socket = std::path::absolute(socket)?;
            if let Some(dir) = entry.parent() {
                remove_links_to(&socket, dir);
            }
            symlink(socket, &entry)
        });
        match made {
            Ok(()) => Some(Entry(entry)),
            Err(error) => {
                let entry = entry.display();
                tracing::warn!(
                    "{entry}: cannot create the entry, so 'fathom list' does not find this \
                     server: {}",
                    cause(error)
                );
                None
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // (Another process may have removed it.)
        let _ = fs::remove_file(&self.0);
    }
}

/// Creates the directory of the entries if it does not exist, and removes entries of killed
/// servers.
pub fn prepare(entry: &Path) -> io::Result<()> {
    let Some(dir) = entry.parent() else {
        return Ok(());
    };
    make_parent_of(dir)?;
    make_private_dir(dir)?;
    remove_stale(dir);
    Ok(())
}

/// Removes links to a socket whose previous servers have ended.
fn remove_links_to(socket: &Path, dir: &Path) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_link = |entry: &PathBuf| fs::read_link(entry).is_ok_and(|to| to == socket);
    for entry in entries.map(|entry| entry.path()).filter(is_link) {
        // (Another server may remove it at the same time.)
        let _ = fs::remove_file(entry);
    }
}

/// Creates a directory that only its owner may use. An existing directory must be one.
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
    Err(io::Error::other(format!(
        "{}: not a directory that only its owner may use; run chmod 700 on it, or remove it",
        dir.display()
    )))
}

/// Removes the entries of killed servers: those named after a process that does not exist, at which
/// no process listens.
fn remove_stale(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_dead = |pid| !Path::new("/proc").join(format!("{pid}")).exists();
        let is_unresponsive = |error: io::Error| {
            [ErrorKind::ConnectionRefused, ErrorKind::NotFound].contains(&error.kind())
        };
        if place::pid_of(&path).is_some_and(is_dead)
            && UnixStream::connect(&path).is_err_and(is_unresponsive)
        {
            // (Another server that starts may have removed it.)
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn entries_of_killed_servers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // (No process has such a large ID: PID_MAX_LIMIT is 2^22.)
        let dead = dir.path().join("4999999.sock");
        let elsewhere = dir.path().join("4999998.sock");
        let dangling = dir.path().join("4999997.sock");
        let linked = dir.path().join("4999996.sock");
        let own = dir.path().join(format!("{}.sock", std::process::id()));
        let other = dir.path().join("other.sock");
        let _live = UnixListener::bind(&elsewhere).unwrap();
        for path in [&dead, &own, &other] {
            drop(UnixListener::bind(path).unwrap());
        }
        symlink(dir.path().join("nothing"), &dangling).unwrap();
        symlink(&elsewhere, &linked).unwrap();
        remove_stale(dir.path());
        assert!(!dead.exists() && symlink_metadata(dangling).is_err());
        assert!(
            [elsewhere, linked, own, other]
                .iter()
                .all(|path| path.exists())
        );
    }

    #[test]
    fn new_server_at_the_socket_of_a_killed_one_has_one_entry() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        make_private_dir(&path).unwrap();
        let socket = dir.path().join("api.sock");
        let _live = UnixListener::bind(&socket).unwrap();
        let (killed, other) = (path.join("1.sock"), path.join("2.sock"));
        symlink(&socket, &killed).unwrap();
        let elsewhere = dir.path().join("other.sock");
        let _other = UnixListener::bind(&elsewhere).unwrap();
        symlink(&elsewhere, &other).unwrap();
        let own = path.join("3.sock");
        let _entry = Entry::make(own.clone(), &socket).unwrap();
        assert!(symlink_metadata(&killed).is_err());
        assert!(other.exists() && own.exists());
    }

    #[test]
    fn only_private_directories_are_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fathom");
        make_private_dir(&path).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().mode() & 0o777, 0o700);
        make_private_dir(&path).unwrap();
        let open = fs::Permissions::from_mode(0o750);
        fs::set_permissions(&path, open).unwrap();
        assert!(make_private_dir(&path).is_err());
        let link = dir.path().join("link");
        symlink(dir.path(), &link).unwrap();
        assert!(make_private_dir(&link).is_err());
    }
}
