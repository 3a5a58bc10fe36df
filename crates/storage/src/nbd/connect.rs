//! Opens sockets with a deadline, and loads the certificates for TLS.

use fathom_files::gate::{self, Wanted};
use fathom_nbd::vsock::VsockAddr;
use fathom_nbd::{Address, NbdUri};
use fathom_tls::{ClientTls, TlsError};
use rustix::io::Errno;
use rustix::net::addr::SocketAddrArg;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Send buffer of a Unix socket in bytes, if the system's limit (net.core.wmem_max) allows it. TCP
/// sizes its buffer itself.
const SEND_BUFFER: usize = 1 << 20;

/// Opens a socket to the server, in this process or through one with more privileges.
pub(super) fn dial_server(uri: &NbdUri, deadline: Instant) -> io::Result<OwnedFd> {
    let patience = deadline.saturating_duration_since(Instant::now());
    let wanted = || Wanted::Server {
        uri: uri.as_str().to_owned(),
        patience_ms: patience.as_millis() as u64,
    };
    match gate::other() {
        Some(gate) => Ok(gate.get(&wanted(), None)?.file),
        None => connect_to(uri, deadline),
    }
}

/// Loads certificates and keys for TLS, in this process or through one with more privileges.
pub(super) fn load_tls(uri: &NbdUri) -> Result<Option<ClientTls>, TlsError> {
    let open = |path: &Path| gate::certificates(uri.as_str(), path);
    uri.tls()
        .map(|terms| ClientTls::load(&terms.files(), &terms.server, &open))
        .transpose()
}

/// Connects to the first of the server's addresses that accepts.
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

/// Connects to the server of a URI, for a process that passes the socket on.
pub fn connect(uri: &str, deadline: Instant) -> io::Result<OwnedFd> {
    let uri: NbdUri = uri.parse().map_err(io::Error::other)?;
    connect_to(&uri, deadline)
}

fn dial(family: AddressFamily, to: &impl SocketAddrArg, deadline: Instant) -> io::Result<OwnedFd> {
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left))?;
    match rustix::net::connect(&socket, to) {
        // connect(2) returns these errors when SO_SNDTIMEO expires.
        Err(Errno::INPROGRESS | Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        done => done?,
    }
    // From now on, operations wait without a limit.
    sockopt::set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket)
}

fn dial_host(host: &str, port: u16, deadline: Instant) -> io::Result<OwnedFd> {
    let mut failed = io::ErrorKind::AddrNotAvailable.into();
    let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
    for (n, &to) in addresses.iter().enumerate() {
        // An address that does not answer leaves time for the others.
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = Instant::now() + left / (addresses.len() - n) as u32;
        let family = match to {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        match dial(family, &to, deadline) {
            Ok(socket) => {
                sockopt::set_tcp_nodelay(&socket, true)?;
                // Keepalive detects a server whose host is gone.
                sockopt::set_socket_keepalive(&socket, true)?;
                return Ok(socket);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}
