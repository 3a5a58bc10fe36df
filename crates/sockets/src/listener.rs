//! Sockets at which clients connect.

use crate::descriptors::Descriptors;
use crate::occupant;
use fathom_units::cause;
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use serde::{Deserialize, Serialize};
use std::fs::{Permissions, symlink_metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

/// Number of connections that may wait to be accepted: as many as the administrator allows
/// (listen(2): net.core.somaxconn). When too many wait, clients of a Unix socket that do not block
/// fail at once.
pub const BACKLOG: i32 = i32::MAX;

/// Permissions without a mode, further narrowed by the umask. A client needs the permission to
/// write: with the usual umask of 022 only the owner has it, with 002 also the group.
const DEFAULT_MODE: u32 = 0o660;

/// Permissions with a group and without a mode, independent of the umask.
const GROUP_MODE: u32 = 0o660;

/// Restricts which users may connect to a socket in the file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Permissions, independent of the umask.
    pub mode: Option<u32>,
    /// ID of the socket's group.
    pub group: Option<u32>,
}

impl Access {
    /// Only the owner may connect.
    pub const PRIVATE: Access = Access {
        mode: Some(0o600),
        group: None,
    };

    fn mode(self) -> Option<u32> {
        self.mode.or(self.group.map(|_| GROUP_MODE))
    }
}

/// A socket cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens at the path.
    #[error("{}: in use by {by}; {}", path.display(), occupant::remedy(by, "path"))]
    InUse {
        /// Path of the socket.
        path: PathBuf,
        /// Description of the process, for messages.
        by: String,
    },
    /// Another process uses the address.
    #[error("{address}: in use by {by}; {}", occupant::remedy(by, "port"))]
    AddressInUse {
        /// Address as text.
        address: String,
        /// Description of the process, for messages.
        by: String,
    },
    /// This path exists and is not a socket.
    #[error("{}: exists and is not a socket; remove it, or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The directory of this path does not exist.
    #[error(
        "{}: no such directory: {}; create it, or choose another path",
        .0.display(),
        .0.parent().unwrap_or(Path::new("")).display()
    )]
    NoDirectory(PathBuf),
    /// This path is longer than the address of a Unix socket can be.
    #[error("{}: longer than 107 bytes, the limit of a socket's path", .0.display())]
    TooLong(PathBuf),
    /// A system call for a socket with a path failed.
    #[error("{}: {what}: {}", path.display(), cause(source))]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// Description of the failure, such as `cannot bind a socket`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// At an address that is not a path.
    #[error("{address}: {what}: {}", cause(source))]
    Address {
        /// Address as text.
        address: String,
        /// Description of the failure, such as `cannot bind a socket`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

/// A listening stream socket. Dropping it removes the socket from its path, if this process has
/// bound it to one.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Path, device and inode of the socket that this process must remove.
    bound: Mutex<Option<(PathBuf, u64, u64)>>,
}

impl Listener {
    /// Listens at `path`. Replaces a socket at which no process listens. Without a mode and a
    /// group, the permissions are 0660 without the bits of the umask.
    pub fn bind(path: &Path, access: Access) -> Result<Listener, ListenError> {
        let failed = |what| {
            let path = path.to_owned();
            move |source: Errno| ListenError::Io {
                path,
                what,
                source: source.into(),
            }
        };
        let addr = SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong(path.to_owned()))?;
        remove_stale(path, &addr)?;
        let socket = stream_socket().map_err(failed("cannot create a socket"))?;
        let socket = high(socket);
        let mode = access.mode();
        // bind(2) takes the new file's permissions from the socket. Therefore others can never
        // connect.
        fchmod(&socket, Mode::from_raw_mode(mode.unwrap_or(DEFAULT_MODE)))
            .map_err(failed("cannot set the socket's permissions"))?;
        bind(&socket, &addr).map_err(|error| match error {
            Errno::NOENT => ListenError::NoDirectory(path.to_owned()),
            other => failed("cannot bind a socket")(other),
        })?;
        let io_failed = |what| {
            let path = path.to_owned();
            move |source| ListenError::Io { path, what, source }
        };
        let meta = symlink_metadata(path).map_err(io_failed("cannot look at the new socket"))?;
        let listener = Listener {
            socket,
            bound: Some((path.to_owned(), meta.dev(), meta.ino())).into(),
        };
        // No client can connect before listen(2).
        if let Some(group) = access.group {
            lchown(path, None, Some(group))
                .map_err(io_failed("cannot change the socket's group"))?;
        }
        if let Some(mode) = mode {
            std::fs::set_permissions(path, Permissions::from_mode(mode))
                .map_err(io_failed("cannot set the socket's permissions"))?;
        }
        listen(&listener, BACKLOG).map_err(failed("cannot listen"))?;
        Ok(listener)
    }

    /// Listens at a socket that another process has bound and will remove. SO_PEERCRED then tells
    /// clients that this process is their peer.
    pub fn taken_over(socket: OwnedFd) -> io::Result<Listener> {
        listen(&socket, BACKLOG)?;
        Ok(Listener::from(socket))
    }

    /// Accepts the next connection. Blocks, unless [`Listener::set_nonblocking`] was called.
    pub fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.socket, SocketFlags::CLOEXEC)
    }

    /// Makes [`Listener::accept`] return EAGAIN if no client waits.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.socket, true)?)
    }
}

/// State of a listening socket that is handed over to another process.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListenerState {
    socket: usize,
    /// Path, device and inode of the socket that the successor must remove.
    bound: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    /// Returns the state for a successor, which must then remove the socket. The caller must not
    /// drop this listener after a complete handover.
    pub fn hand_over(&self, descriptors: &mut Descriptors) -> io::Result<ListenerState> {
        Ok(ListenerState {
            socket: descriptors.add(&self.socket)?,
            bound: self.bound.lock().clone(),
        })
    }

    /// Creates a listener from a predecessor's state. The predecessor removes the socket until
    /// [`Listener::own`].
    pub fn adopt(
        state: ListenerState,
        descriptors: &mut Descriptors,
    ) -> Result<(Listener, Bound), String> {
        let socket = descriptors.take(state.socket)?;
        match rustix::net::sockopt::socket_acceptconn(&socket) {
            Ok(true) => Ok((Listener::from(socket), Bound(state.bound))),
            _ => Err("not a listening socket".into()),
        }
    }

    /// Takes over the duty to remove the socket from the predecessor.
    pub fn own(&self, Bound(bound): Bound) {
        *self.bound.lock() = bound;
    }

    /// Removes the socket from its path, if that is this listener's duty. Clients cannot find the
    /// socket afterwards.
    pub fn unbind(&self) {
        let Some((path, dev, ino)) = self.bound.lock().take() else {
            return;
        };
        // (Another process may have bound its socket to the path.)
        if symlink_metadata(&path).is_ok_and(|m| m.dev() == dev && m.ino() == ino) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Leaves the duty to remove the socket to another process.
    pub fn disown(&self) {
        *self.bound.lock() = None;
    }
}

/// Path of a predecessor's socket that must be removed.
#[derive(Debug)]
pub struct Bound(Option<(PathBuf, u64, u64)>);

impl Bound {
    /// Notes that the socket was renamed.
    pub fn renamed(&mut self, path: PathBuf) {
        if let Some((bound, ..)) = &mut self.0 {
            *bound = path;
        }
    }

    /// Returns the path. `None`: the socket need not be removed.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_ref().map(|(path, ..)| path.as_path())
    }
}

/// Creates a listener that need not be removed: the socket has no path, or another process has
/// bound it and will remove it (socket activation).
impl From<OwnedFd> for Listener {
    fn from(socket: OwnedFd) -> Listener {
        Listener {
            socket: high(socket),
            bound: Mutex::default(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.unbind();
    }
}

/// Lowest number of listeners' file descriptors: above most other descriptors of a process.
const HIGH: i32 = 512;

/// Moves a socket to a high number. The kernel closes the files of a killed process from the
/// highest number down. Therefore a client that loses its connection and reconnects at once is
/// refused, and is not accepted by a dead process.
fn high(socket: OwnedFd) -> OwnedFd {
    // (The number may be above the limit of the process.)
    rustix::io::fcntl_dupfd_cloexec(&socket, HIGH).unwrap_or(socket)
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes the socket at `path` if no process listens there.
fn remove_stale(path: &Path, addr: &SocketAddrUnix) -> Result<(), ListenError> {
    let failed = |what| {
        let path = path.to_owned();
        move |source| ListenError::Io { path, what, source }
    };
    let meta = match symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("cannot look at the existing file")(e)),
    };
    if FileType::from_raw_mode(meta.mode()) != FileType::Socket {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    let probe = stream_socket().map_err(|e| failed("cannot create a socket")(e.into()))?;
    match connect(&probe, addr) {
        Err(Errno::CONNREFUSED) => {
            tracing::debug!("replacing the stale socket {}", path.display());
            std::fs::remove_file(path).map_err(failed("cannot remove the stale socket"))
        }
        // AGAIN: a process listens, and its backlog is full.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse {
            path: path.to_owned(),
            by: occupant::at_unix(&probe),
        }),
        Err(e) => Err(failed("cannot find out whether a process listens there")(
            e.into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn bound_socket_has_its_mode_and_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let open_to_all = Access {
            mode: Some(0o666),
            group: None,
        };
        let listener = Listener::bind(&path, open_to_all).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().mode() & 0o777, 0o666);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(symlink_metadata(&path).is_err());
        let _default = Listener::bind(&path, Access::default()).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().mode() & 0o117, 0);
    }

    #[test]
    fn stale_socket_is_replaced_and_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let live = Listener::bind(&path, Access::default()).unwrap();
        let error = Listener::bind(&path, Access::default()).unwrap_err();
        assert!(matches!(error, ListenError::InUse { .. }), "{error}");
        assert!(
            error.to_string().contains("in use by this server itself"),
            "{error}"
        );
        drop(live);
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&path, Access::default()).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn socket_that_another_listener_has_bound_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let old = Listener::bind(&path, Access::default()).unwrap();
        // (Prevents that the inode's number is reused.)
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        let _new = Listener::bind(&path, Access::default()).unwrap();
        drop(old);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn path_that_is_too_long_is_an_error() {
        let long = PathBuf::from("x".repeat(109));
        let error = Listener::bind(&long, Access::default()).unwrap_err();
        assert!(matches!(error, ListenError::TooLong(_)), "{error}");
    }
}
