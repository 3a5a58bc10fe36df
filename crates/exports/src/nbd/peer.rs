//! Who a client is, and what its socket needs.

use fathom_nbd::vsock::VsockAddr;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, sockopt};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long a peer that has vanished may go unnoticed while nothing is sent:
/// a minute, then six more tries.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_TRIES: u32 = 6;

/// Set up a connection that was just accepted. TCP: small replies at once
/// (proto.md, "Protocol phases"), and an end to connections whose client's
/// machine is gone.
pub fn prepare(socket: &OwnedFd) {
    let family = sockopt::socket_domain(socket);
    if !matches!(family, Ok(AddressFamily::INET | AddressFamily::INET6)) {
        return;
    }
    let set = sockopt::set_tcp_nodelay(socket, true)
        .and_then(|()| sockopt::set_socket_keepalive(socket, true))
        .and_then(|()| sockopt::set_tcp_keepidle(socket, KEEP_IDLE))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, KEEP_INTERVAL))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, KEEP_TRIES));
    if let Err(error) = set {
        tracing::debug!("nbd: a socket's options cannot be set: {error}");
    }
}

/// For people: `process 17`, `192.0.2.1:4000`, `vsock 3:1025`.
pub fn name(socket: &OwnedFd) -> String {
    match getpeername(socket) {
        Ok(Some(any)) => name_of(socket, any),
        // It is gone already.
        _ => "unknown client".into(),
    }
}

fn name_of(socket: &OwnedFd, any: SocketAddrAny) -> String {
    match any.address_family() {
        AddressFamily::UNIX => match sockopt::socket_peercred(socket) {
            Ok(cred) => format!("process {}", cred.pid.as_raw_pid()),
            Err(_) => "unknown process".into(),
        },
        AddressFamily::VSOCK => format!("vsock {}", VsockAddr::from_any(&any)),
        _ => match SocketAddr::try_from(any) {
            Ok(addr) => addr.to_string(),
            Err(_) => "unknown client".into(),
        },
    }
}

/// What accept(2) says may be passed on from the new connection, and is no
/// fault of the listening socket.
pub fn is_network_error(error: Errno) -> bool {
    matches!(
        error,
        Errno::NETDOWN
            | Errno::PROTO
            | Errno::NOPROTOOPT
            | Errno::HOSTDOWN
            | Errno::NONET
            | Errno::HOSTUNREACH
            | Errno::OPNOTSUPP
            | Errno::NETUNREACH
            | Errno::PERM
    )
}
