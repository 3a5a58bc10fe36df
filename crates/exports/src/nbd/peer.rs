//! Identifies clients and sets up their sockets.

use fathom_nbd::vsock::VsockAddr;
use fathom_units::cause;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, sockopt};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// TCP keepalive: a vanished peer is detected after a minute of silence and six more probes.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_TRIES: u32 = 6;

/// Sets up a new connection. On TCP, small replies are sent at once (proto.md, "Protocol phases"),
/// and connections end if the client's machine is gone.
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
        tracing::debug!("nbd: cannot set a socket's options: {}", cause(error));
    }
}

/// Owner of a connection, for the limit on connections per client. All processes of a user, and all
/// addresses of an IPv6 /64 network, count as one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    User(u32),
    V4(Ipv4Addr),
    /// The upper 64 bits of an IPv6 address.
    V6(u64),
    /// A virtual machine's CID.
    Machine(u32),
    Unknown,
}

impl Peer {
    pub fn of(socket: &OwnedFd) -> Peer {
        let Ok(Some(any)) = getpeername(socket) else {
            return Peer::Unknown; // the client is already gone
        };
        match any.address_family() {
            AddressFamily::UNIX => {
                let cred = sockopt::socket_peercred(socket);
                cred.map_or(Peer::Unknown, |cred| Peer::User(cred.uid.as_raw()))
            }
            AddressFamily::VSOCK => Peer::Machine(VsockAddr::from_any(&any).cid()),
            _ => SocketAddr::try_from(any).map_or(Peer::Unknown, |addr| Peer::at(addr.ip())),
        }
    }

    fn at(ip: IpAddr) -> Peer {
        match ip.to_canonical() {
            IpAddr::V4(v4) => Peer::V4(v4),
            IpAddr::V6(v6) => Peer::V6((v6.to_bits() >> 64) as u64),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::User(uid) => write!(f, "user {uid}"),
            Peer::V4(ip) => write!(f, "{ip}"),
            Peer::V6(net) => write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(*net) << 64)),
            Peer::Machine(cid) => write!(f, "vsock {cid}"),
            Peer::Unknown => f.write_str("clients of unknown origin"),
        }
    }
}

/// Returns the client's name for users: `process 17`, `192.0.2.1:4000`, `vsock 3:1025`.
pub fn name(socket: &OwnedFd) -> String {
    match getpeername(socket) {
        Ok(Some(any)) => name_of(socket, any),
        // The client is already gone.
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

/// Returns true for errors that accept(2) passes on from the new connection, and that are no fault
/// of the listening socket.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_several_addresses_is_one() {
        let at = |text: &str| Peer::at(text.parse().unwrap());
        assert_eq!(at("192.0.2.1"), at("::ffff:192.0.2.1"));
        assert_ne!(at("192.0.2.1"), at("192.0.2.2"));
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:1"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
    }
}
