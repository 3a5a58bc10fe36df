//! The socket for front-ends: made here or inherited.

use crate::daemon::Error;
use crate::options::SocketSpec;
use fathom_exports::Listener;
use listenfd::ListenFd;
use rustix::fs::FileType;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

/// Listen where `spec` says. Call it before there are threads: sockets from
/// a service manager are found by environment variables, which are then
/// removed.
pub fn listen(spec: &SocketSpec) -> Result<Listener, Error> {
    match spec {
        SocketSpec::Path(path) => Ok(Listener::bind(path, None)?),
        SocketSpec::Fd(fd) => inherited(*fd),
        SocketSpec::Activated => activated(),
    }
}

fn activated() -> Result<Listener, Error> {
    let mut sockets = ListenFd::from_env();
    let problem = match sockets.len() {
        0 => "no socket was passed by the service manager; give one by --vhost-user".into(),
        1 => match sockets.take_unix_listener(0) {
            Ok(Some(listener)) => return checked(listener, "the service manager's socket"),
            Ok(None) => "the service manager's socket is gone".into(),
            Err(error) => format!("the service manager's socket cannot be used: {error}"),
        },
        n => format!("{n} sockets were passed by the service manager; one disk needs one"),
    };
    Err(Error::Socket(problem))
}

fn inherited(fd: i32) -> Result<Listener, Error> {
    let name = format!("file descriptor {fd}");
    // SAFETY: used for one fcntl(2), which fails if it is not open; the
    // process owns what it inherited.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd: OwnedFd = rustix::io::fcntl_dupfd_cloexec(fd, 0)
        .map_err(|error| Error::Socket(format!("{name} cannot be used: {error}")))?;
    let is_socket = rustix::fs::fstat(&fd)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
    if !is_socket {
        return Err(Error::Socket(format!("{name} is not a socket")));
    }
    checked(fd.into(), &name)
}

fn checked(listener: UnixListener, name: &str) -> Result<Listener, Error> {
    if is_unix_listener(listener.as_fd()).unwrap_or(false) {
        return Ok(OwnedFd::from(listener).into());
    }
    let problem = format!("{name} is not a listening Unix stream socket");
    Err(Error::Socket(problem))
}

fn is_unix_listener(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(sockopt::socket_domain(fd)? == AddressFamily::UNIX
        && sockopt::socket_type(fd)? == SocketType::STREAM
        && sockopt::socket_acceptconn(fd)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn an_inherited_socket_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let good = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(listen(&SocketSpec::Fd(good.as_raw_fd())).is_ok());
        let (connected, _) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for bad in [
            connected.as_raw_fd(),
            file.as_raw_fd(),
            tcp.as_raw_fd(),
            1_000_000,
        ] {
            assert!(listen(&SocketSpec::Fd(bad)).is_err(), "{bad}");
        }
    }
}
