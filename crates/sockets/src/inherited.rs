//! Listening sockets that this process has inherited: by their numbers, or from a service manager.

use crate::listener::Listener;
use fathom_units::cause;
use listenfd::ListenFd;
use rustix::fs::FileType;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// An inherited socket cannot be used: the option that names the socket, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{option}: {problem}")]
pub struct InheritedError {
    option: &'static str,
    problem: String,
}

/// Requirements on an inherited socket.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Option that names the socket.
    pub option: &'static str,
    /// Address families that the socket may have.
    pub families: &'static [AddressFamily],
    /// Kind of the socket for messages, such as "Unix stream socket".
    pub kind: &'static str,
}

impl Wanted {
    /// An error about an inherited socket.
    pub fn problem(self, problem: impl Into<String>) -> InheritedError {
        InheritedError {
            option: self.option,
            problem: problem.into(),
        }
    }

    /// Returns the socket with this file descriptor, duplicated.
    pub fn inherited(self, fd: i32) -> Result<Listener, InheritedError> {
        let name = format!("file descriptor {fd}");
        // SAFETY: used for one fcntl(2), which fails if the descriptor is not open. The process
        // owns what it inherited.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let fd: OwnedFd = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| {
            self.problem(format!(
                "{name}: cannot duplicate the file descriptor: {}",
                cause(error)
            ))
        })?;
        self.check(fd, &name)
    }

    /// Returns all sockets that the service manager has passed: at least one.
    ///
    /// Must be called before threads exist that read the environment: this function removes the
    /// variables that announce the sockets.
    pub fn activated(self) -> Result<Vec<Listener>, InheritedError> {
        let mut sockets = ListenFd::from_env();
        if sockets.len() == 0 {
            let option = self.option;
            return Err(self.problem(format!(
                "the service manager passed no socket; give one by {option}"
            )));
        }
        let mut listeners = Vec::new();
        for i in 0..sockets.len() {
            let fd = sockets.take_raw_fd(i).ok().flatten();
            let fd =
                fd.ok_or_else(|| self.problem("the service manager's socket was already used"))?;
            // SAFETY: listenfd returns each passed descriptor once.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            listeners.push(self.check(socket, "the service manager's socket")?);
        }
        Ok(listeners)
    }

    fn check(self, socket: OwnedFd, name: &str) -> Result<Listener, InheritedError> {
        let is_socket = rustix::fs::fstat(&socket)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
        if !is_socket {
            return Err(self.problem(format!("{name} is not a socket")));
        }
        match is_listener(socket.as_fd(), self.families) {
            Ok(true) => Ok(socket.into()),
            _ => Err(self.problem(format!("{name} is not a listening {}", self.kind))),
        }
    }
}

fn is_listener(fd: BorrowedFd<'_>, families: &[AddressFamily]) -> io::Result<bool> {
    Ok(families.contains(&sockopt::socket_domain(fd)?)
        && sockopt::socket_type(fd)? == SocketType::STREAM
        && sockopt::socket_acceptconn(fd)?)
}

/// Returns the path of a Unix socket. None: the socket has no path.
pub fn path_of(socket: BorrowedFd<'_>) -> Option<PathBuf> {
    let address = rustix::net::getsockname(socket).ok()?;
    let address = SocketAddrUnix::try_from(address).ok()?;
    let path = address.path()?;
    Some(OsStr::from_bytes(path.to_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    const UNIX: Wanted = Wanted {
        option: "--socket",
        families: &[AddressFamily::UNIX],
        kind: "Unix stream socket",
    };
    const ANY: Wanted = Wanted {
        option: "--socket",
        families: &[AddressFamily::UNIX, AddressFamily::INET],
        kind: "stream socket",
    };

    #[test]
    fn only_listening_sockets_of_the_wanted_families_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let good = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(UNIX.inherited(good.as_raw_fd()).is_ok());
        assert!(ANY.inherited(good.as_raw_fd()).is_ok());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(UNIX.inherited(tcp.as_raw_fd()).is_err());
        assert!(ANY.inherited(tcp.as_raw_fd()).is_ok());
        let (connected, _) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        for bad in [connected.as_raw_fd(), file.as_raw_fd(), 1_000_000] {
            assert!(UNIX.inherited(bad).is_err(), "{bad}");
            assert!(ANY.inherited(bad).is_err(), "{bad}");
        }
    }
}
