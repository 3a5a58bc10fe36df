//! A connected socket, with one deadline for all that blocks on it.

use fathom_files::gate::{self, Wanted};
use fathom_nbd::vsock::VsockAddr;
use fathom_nbd::{Address, NbdUri};
use rustix::io::Errno;
use rustix::net::addr::SocketAddrArg;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Bytes that a Unix socket may hold for the server, if the system's limit
/// (net.core.wmem_max) allows it. TCP finds out by itself.
const SEND_BUFFER: usize = 1 << 20;

/// A socket until the deadline.
pub(super) struct Dialled {
    socket: OwnedFd,
    deadline: Instant,
}

impl Dialled {
    pub(super) fn new(uri: &NbdUri, deadline: Instant) -> io::Result<Dialled> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let wanted = || Wanted::Server {
            uri: uri.as_str().to_owned(),
            patience_ms: patience.as_millis() as u64,
        };
        let socket = match gate::other() {
            Some(gate) => gate.get(&wanted(), None)?.file,
            None => connect_to(uri, deadline)?,
        };
        Ok(Dialled { socket, deadline })
    }

    /// For the time after the handshake: an operation waits as long as it takes.
    pub(super) fn into_socket(self) -> io::Result<OwnedFd> {
        for direction in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&self.socket, direction, None)?;
        }
        Ok(self.socket)
    }

    fn arm(&self, direction: Timeout) -> io::Result<()> {
        arm(&self.socket, direction, self.deadline)
    }
}

/// Connects to the first of the server's addresses that answers. All that blocks on the socket ends at
/// the deadline, until [`Dialled::into_socket`].
fn connect_to(uri: &NbdUri, deadline: Instant) -> io::Result<OwnedFd> {
    match uri.address() {
        Address::Unix(path) => {
            let to = SocketAddrUnix::new(path.as_path())?;
            let socket = dial(AddressFamily::UNIX, &to, deadline)?;
            let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
            Ok(socket)
        }
        Address::Tcp(host, port) => dial_host(host, *port, deadline),
        Address::Vsock { cid, port } => {
            let to = VsockAddr::new(*cid, *port);
            dial(AddressFamily::VSOCK, &to, deadline)
        }
    }
}

/// The same for who hands the socket on.
pub fn connect(uri: &str, deadline: Instant) -> io::Result<OwnedFd> {
    let uri: NbdUri = uri.parse().map_err(io::Error::other)?;
    connect_to(&uri, deadline)
}

/// The next operation ends at the deadline.
fn arm(socket: &OwnedFd, direction: Timeout, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(sockopt::set_socket_timeout(socket, direction, Some(left))?)
}

fn dial(family: AddressFamily, to: &impl SocketAddrArg, deadline: Instant) -> io::Result<OwnedFd> {
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    arm(&socket, Timeout::Send, deadline)?;
    match rustix::net::connect(&socket, to) {
        // What is left of SO_SNDTIMEO, for a connect.
        Err(Errno::INPROGRESS | Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(socket),
    }
}

fn dial_host(host: &str, port: u16, deadline: Instant) -> io::Result<OwnedFd> {
    let mut failed = io::ErrorKind::AddrNotAvailable.into();
    for to in (host, port).to_socket_addrs()? {
        let family = match to {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        match dial(family, &to, deadline) {
            Ok(socket) => {
                sockopt::set_tcp_nodelay(&socket, true)?;
                // A server whose host is gone is noticed, sooner or later.
                sockopt::set_socket_keepalive(&socket, true)?;
                return Ok(socket);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

impl Read for Dialled {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.arm(Timeout::Recv)?;
        Ok(rustix::io::read(&self.socket, buffer)?)
    }
}

impl Write for Dialled {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.arm(Timeout::Send)?;
        let flags = rustix::net::SendFlags::NOSIGNAL;
        Ok(rustix::net::send(&self.socket, bytes, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
