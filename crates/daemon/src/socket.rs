//! The sockets for clients: made here or inherited.

use crate::error::Error;
use crate::runtime;
use fathom_exports::nbd::{Address, listen_at};
use fathom_exports::{Access, Listener};
use fathom_spec::SocketSpec;
use fathom_units::cause;
use listenfd::ListenFd;
use rustix::fs::FileType;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Listen where `spec` says. Call it before there are threads that look at the
/// environment: sockets from a service manager are found by its variables,
/// which are then removed.
pub fn listen_for_front_ends(spec: &SocketSpec, access: Access) -> Result<Listener, Error> {
    match spec {
        SocketSpec::Path(path) => {
            make_parent_of(path)?;
            Ok(Listener::bind(path, access)?)
        }
        SocketSpec::Fd(fd) => inherited(*fd, VHOST_USER),
        SocketSpec::Activated => {
            let mut sockets = activated(VHOST_USER)?;
            match (sockets.pop(), sockets.len()) {
                (Some(socket), 0) => Ok(socket),
                (_, n) => Err(VHOST_USER.problem(format!(
                    "the service manager passed {} sockets, and the disk needs exactly one",
                    n + 1
                ))),
            }
        }
    }
}

/// Listen where the API's clients connect; what else there is to know is the path at which they do.
pub fn listen_for_api(spec: &SocketSpec, access: Access) -> Result<(Listener, PathBuf), Error> {
    let listener = match spec {
        SocketSpec::Path(path) => {
            make_parent_of(path)?;
            return Ok((Listener::bind(path, access)?, path.clone()));
        }
        SocketSpec::Fd(fd) => inherited(*fd, API)?,
        SocketSpec::Activated => {
            return Err(API.problem("an inherited API socket must be given as a path or fd:N"));
        }
    };
    let path = path_of(listener.as_fd());
    let path = path.ok_or_else(|| API.problem(format!("{spec}: the socket has no path")))?;
    Ok((listener, path))
}

/// Where a Unix socket is, if it is at a path.
pub fn path_of(socket: BorrowedFd<'_>) -> Option<PathBuf> {
    let address = rustix::net::getsockname(socket).ok()?;
    let address = SocketAddrUnix::try_from(address).ok()?;
    let path = address.path()?;
    Some(OsStr::from_bytes(path.to_bytes()).into())
}

/// Listen at all of `addresses`; the same holds.
pub fn listen_for_nbd<'a>(
    addresses: impl Iterator<Item = &'a Address>,
    access: Access,
) -> Result<Vec<Listener>, Error> {
    let mut listeners = Vec::new();
    for address in addresses {
        match address {
            Address::Fd(fd) => listeners.push(inherited(*fd, NBD)?),
            Address::Activated => listeners.extend(activated(NBD)?),
            address => {
                if let Address::Unix(path) = address {
                    make_parent_of(path)?;
                }
                listeners.extend(listen_at(address, access)?);
            }
        }
    }
    Ok(listeners)
}

fn make_parent_of(socket: &Path) -> Result<(), Error> {
    runtime::make_parent_of(socket).map_err(Error::io("cannot create the directory of a socket"))
}

/// What an inherited socket is for.
#[derive(Clone, Copy)]
struct Wanted {
    option: &'static str,
    families: &'static [AddressFamily],
    /// What that is, in words.
    kind: &'static str,
}

const VHOST_USER: Wanted = Wanted {
    option: "--vhost-user",
    families: &[AddressFamily::UNIX],
    kind: "Unix stream socket",
};

const NBD: Wanted = Wanted {
    option: "--nbd",
    families: &[
        AddressFamily::UNIX,
        AddressFamily::INET,
        AddressFamily::INET6,
        AddressFamily::VSOCK,
    ],
    kind: "stream socket (Unix, TCP or vsock)",
};

const API: Wanted = Wanted {
    option: "--api",
    families: &[AddressFamily::UNIX],
    kind: "Unix stream socket",
};

impl Wanted {
    fn problem(self, problem: impl Into<String>) -> Error {
        Error::Socket {
            option: self.option,
            problem: problem.into(),
        }
    }

    fn check(self, socket: OwnedFd, name: &str) -> Result<Listener, Error> {
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

/// All sockets that the service manager has passed, one at least.
fn activated(wanted: Wanted) -> Result<Vec<Listener>, Error> {
    let mut sockets = ListenFd::from_env();
    if sockets.len() == 0 {
        let option = wanted.option;
        return Err(wanted.problem(format!(
            "the service manager passed no socket; give one by {option}"
        )));
    }
    let mut listeners = Vec::new();
    for i in 0..sockets.len() {
        let fd = sockets.take_raw_fd(i).ok().flatten();
        let fd =
            fd.ok_or_else(|| wanted.problem("the service manager's socket was already used"))?;
        // SAFETY: listenfd hands out each descriptor that was passed once.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        listeners.push(wanted.check(socket, "the service manager's socket")?);
    }
    Ok(listeners)
}

fn inherited(fd: i32, wanted: Wanted) -> Result<Listener, Error> {
    let name = format!("file descriptor {fd}");
    // SAFETY: used for one fcntl(2), which fails if it is not open; the
    // process owns what it inherited.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd: OwnedFd = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| {
        wanted.problem(format!(
            "{name}: cannot duplicate the file descriptor: {}",
            cause(error)
        ))
    })?;
    wanted.check(fd, &name)
}

fn is_listener(fd: BorrowedFd<'_>, families: &[AddressFamily]) -> io::Result<bool> {
    Ok(families.contains(&sockopt::socket_domain(fd)?)
        && sockopt::socket_type(fd)? == SocketType::STREAM
        && sockopt::socket_acceptconn(fd)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn an_inherited_socket_is_checked() {
        let listen = |fd: i32| listen_for_front_ends(&SocketSpec::Fd(fd), Access::default());
        let nbd = |fd: i32| listen_for_nbd([Address::Fd(fd)].iter(), Access::default());
        let dir = tempfile::tempdir().unwrap();
        let good = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(listen(good.as_raw_fd()).is_ok());
        assert!(nbd(good.as_raw_fd()).is_ok());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(listen(tcp.as_raw_fd()).is_err());
        assert!(nbd(tcp.as_raw_fd()).is_ok());
        let (connected, _) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        for bad in [connected.as_raw_fd(), file.as_raw_fd(), 1_000_000] {
            assert!(listen(bad).is_err(), "{bad}");
            assert!(nbd(bad).is_err(), "{bad}");
        }
    }
}
