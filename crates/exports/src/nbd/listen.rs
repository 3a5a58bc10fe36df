//! Addresses of NBD servers, and listening sockets for them.

use fathom_nbd::uri::PORT;
use fathom_nbd::vsock::{ANY_CID, VsockAddr};
use fathom_sockets::occupant;
use fathom_sockets::{Access, BACKLOG, ListenError, Listener};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt,
};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Host name or IP address; an empty host stands for all addresses of this machine.
    Tcp {
        /// Name or IP address without brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// Address of a socket for virtual machines (vsock(7)).
    Vsock {
        /// Context identifier (CID); VMADDR_CID_ANY for all CIDs of this machine.
        cid: u32,
        /// Port number.
        port: u32,
    },
    /// A listening socket inherited as this file descriptor.
    Fd(i32),
    /// The listening sockets that a service manager passes (sd_listen_fds(3)).
    Activated,
}

const FORMS: &str = "unix:PATH, tcp:HOST:PORT, vsock:CID:PORT, fd:N or systemd";

impl Address {
    /// Parses an address: `unix:PATH`, `tcp:HOST[:PORT]`, `vsock:CID[:PORT]` (CID may be `any`),
    /// `fd:N`, `systemd`, or a client's URI.
    ///
    /// The URIs are `nbd://HOST[:PORT]`, `nbd+unix:///?socket=PATH` and `nbd+vsock://CID[:PORT]`.
    pub fn parse(text: &OsStr) -> Result<Address, String> {
        let bad = || format!("'{}' is not {FORMS}", text.display());
        if text == "systemd" {
            return Ok(Address::Activated);
        }
        if let Some(path) = unix_path(text) {
            return match path.is_empty() {
                true => Err(bad()),
                false => Ok(Address::Unix(path.into())),
            };
        }
        let text = text.to_str().ok_or_else(bad)?;
        if let Some((scheme, rest)) = text.split_once("://") {
            return parse_uri(scheme, rest);
        }
        let (kind, rest) = text.split_once(':').ok_or_else(bad)?;
        match kind {
            "tcp" => parse_tcp(rest),
            "vsock" => parse_vsock(rest),
            "fd" => match rest.parse() {
                Ok(fd) if fd >= 0 => Ok(Address::Fd(fd)),
                _ => Err(format!("'{rest}' is not the number of a file descriptor")),
            },
            _ => Err(bad()),
        }
    }
}

/// Returns the path of a `unix:` address. A path need not be UTF-8.
fn unix_path(text: &OsStr) -> Option<&OsStr> {
    use std::os::unix::ffi::OsStrExt;
    text.as_bytes()
        .strip_prefix(b"unix:")
        .map(OsStr::from_bytes)
}

/// Parses those URIs of doc/uri.md that a server can listen on.
fn parse_uri(scheme: &str, rest: &str) -> Result<Address, String> {
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (name, query) = path.split_once('?').unwrap_or((path, ""));
    if !name.is_empty() {
        return Err(format!(
            "'{name}' in the URI is an export's name, which a listener does not have; use --export-name"
        ));
    }
    match scheme {
        "nbd" if query.is_empty() => parse_tcp(authority),
        "nbd+vsock" if query.is_empty() => parse_vsock(authority),
        "nbd+unix" if authority.is_empty() => {
            let socket = query.strip_prefix("socket=").unwrap_or_default();
            if socket.is_empty() || socket.contains(['&', '%']) {
                return Err(
                    "the URI of a Unix socket is nbd+unix:///?socket=PATH, without characters in \
                     PATH that need quoting; otherwise use unix:PATH"
                        .into(),
                );
            }
            Ok(Address::Unix(socket.into()))
        }
        _ if scheme.starts_with("nbds") => Err(format!(
            "{scheme}:// is a URI for clients; a listener uses --tls"
        )),
        _ => Err(format!("'{scheme}://{rest}' is not {FORMS}")),
    }
}

fn parse_tcp(text: &str) -> Result<Address, String> {
    let bad = || format!("'{text}' is not HOST:PORT, such as 127.0.0.1:{PORT} or [::1]:{PORT}");
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "'tcp:{text}' names no host; write 'tcp::{text}' to listen at all addresses of this machine, or \
             'tcp:127.0.0.1:{text}'"
        ));
    }
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(bad)?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| bad())?;
            match port {
                "" => (host, None),
                _ => (host, Some(port.strip_prefix(':').ok_or_else(bad)?)),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| bad()))?;
    let host = host.to_owned();
    Ok(Address::Tcp { host, port })
}

fn parse_vsock(text: &str) -> Result<Address, String> {
    let bad = || format!("'{text}' is not CID:PORT, such as any:{PORT} or 2:{PORT}");
    let (cid, port) = match text.split_once(':') {
        Some((cid, port)) => (cid, port.parse().map_err(|_| bad())?),
        None => (text, PORT.into()),
    };
    let cid = match cid {
        "any" | "" => ANY_CID,
        cid => cid.parse().map_err(|_| bad())?,
    };
    Ok(Address::Vsock { cid, port })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Address::Vsock { cid: ANY_CID, port } => write!(f, "vsock:any:{port}"),
            Address::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Address::Fd(fd) => write!(f, "fd:{fd}"),
            Address::Activated => f.write_str("systemd"),
        }
    }
}

/// Creates the listening sockets of an address; a host name may yield several. Returns none for
/// inherited sockets, which the caller finds itself. `access` applies to Unix sockets.
pub fn listen_at(address: &Address, access: Access) -> Result<Vec<Listener>, ListenError> {
    match address {
        Address::Unix(path) => Ok(vec![Listener::bind(path, access)?]),
        Address::Tcp { host, port } => listen_tcp(address, host, *port),
        Address::Vsock { cid, port } => {
            let addr = VsockAddr::new(*cid, *port);
            let socket = stream_socket(AddressFamily::VSOCK)
                .map_err(failed(address, "cannot create a socket"))?;
            bind(&socket, &addr).map_err(|error| match error {
                Errno::ADDRINUSE => in_use(address, "another process".into()),
                other => failed(address, "cannot bind a socket")(other),
            })?;
            Ok(vec![start(address, socket)?])
        }
        Address::Fd(_) | Address::Activated => Ok(Vec::new()),
    }
}

fn failed(address: &impl fmt::Display, what: &'static str) -> impl Fn(Errno) -> ListenError {
    let address = address.to_string();
    move |source| ListenError::Address {
        address: address.clone(),
        what,
        source: source.into(),
    }
}

fn in_use(address: &Address, by: String) -> ListenError {
    ListenError::AddressInUse {
        address: address.to_string(),
        by,
    }
}

fn listen_tcp(address: &Address, host: &str, port: u16) -> Result<Vec<Listener>, ListenError> {
    if host.is_empty() {
        // IPv6 including IPv4, or IPv4 only on a machine without IPv6.
        let all = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), port);
        let one = bind_tcp(address, all("::"), false).or_else(|error| match error {
            ListenError::AddressInUse { .. } => Err(error),
            _ => bind_tcp(address, all("0.0.0.0"), false),
        });
        return Ok(vec![one?]);
    }
    let found = (host, port)
        .to_socket_addrs()
        .map_err(|source| ListenError::Address {
            address: address.to_string(),
            what: "cannot look up the host's address",
            source,
        })?;
    let addrs: Vec<SocketAddr> = found.collect();
    let mut listeners = Vec::new();
    let mut error = None;
    for addr in &addrs {
        match bind_tcp(address, *addr, addrs.len() > 1) {
            Ok(listener) => listeners.push(listener),
            Err(e) => error = Some(e),
        }
    }
    // Some addresses of a name may belong to a family that this machine does not support.
    match error {
        Some(error) if listeners.is_empty() => Err(error),
        _ => Ok(listeners),
    }
}

fn bind_tcp(address: &Address, addr: SocketAddr, v6_only: bool) -> Result<Listener, ListenError> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = stream_socket(family).map_err(failed(address, "cannot create a socket"))?;
    let options = sockopt::set_socket_reuseaddr(&socket, true).and_then(|()| match addr {
        SocketAddr::V4(_) => Ok(()),
        SocketAddr::V6(_) => sockopt::set_ipv6_v6only(&socket, v6_only),
    });
    options.map_err(failed(address, "cannot set the socket's options"))?;
    bind(&socket, &addr).map_err(|error| match error {
        Errno::ADDRINUSE => in_use(address, occupant::at_tcp(addr)),
        other => failed(address, "cannot bind a socket")(other),
    })?;
    listen(&socket, BACKLOG).map_err(|error| match error {
        Errno::ADDRINUSE => in_use(address, occupant::at_tcp(addr)),
        other => failed(address, "cannot listen")(other),
    })?;
    Ok(socket.into())
}

fn start(address: &Address, socket: OwnedFd) -> Result<Listener, ListenError> {
    listen(&socket, BACKLOG).map_err(failed(address, "cannot listen"))?;
    Ok(socket.into())
}

fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None)
}

/// Returns the address of a listener, as clients write it.
pub fn local_name(listener: &Listener) -> io::Result<String> {
    let any = getsockname(listener)?;
    if any.address_family() == AddressFamily::VSOCK {
        let addr = VsockAddr::from_any(&any);
        return Ok(format!("vsock:{addr}"));
    }
    if let Ok(addr) = SocketAddr::try_from(any.clone()) {
        return Ok(format!("tcp:{addr}"));
    }
    let path = rustix::net::SocketAddrUnix::try_from(any)?;
    let path = path.path_bytes().unwrap_or_default();
    Ok(format!("unix:{}", String::from_utf8_lossy(path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    fn parse(text: &str) -> Result<Address, String> {
        Address::parse(OsStr::new(text))
    }

    fn tcp(host: &str, port: u16) -> Result<Address, String> {
        let host = host.to_owned();
        Ok(Address::Tcp { host, port })
    }

    #[test]
    fn addresses_are_read_as_people_write_them() {
        assert_eq!(parse("unix:/run/x"), Ok(Address::Unix("/run/x".into())));
        assert_eq!(parse("unix:a:b"), Ok(Address::Unix("a:b".into())));
        assert_eq!(parse("tcp:127.0.0.1:1"), tcp("127.0.0.1", 1));
        assert_eq!(parse("tcp:[::]:10809"), tcp("::", 10809));
        assert_eq!(parse("tcp:[::1]"), tcp("::1", PORT));
        assert_eq!(parse("tcp:localhost"), tcp("localhost", PORT));
        assert_eq!(parse("tcp::7"), tcp("", 7));
        let vsock = |cid, port| Ok(Address::Vsock { cid, port });
        assert_eq!(parse("vsock:2:1234567"), vsock(2, 1_234_567));
        assert_eq!(parse("vsock:any:1"), vsock(ANY_CID, 1));
        assert_eq!(parse("vsock:1"), vsock(1, 10809));
        assert_eq!(parse("fd:3"), Ok(Address::Fd(3)));
        assert_eq!(parse("systemd"), Ok(Address::Activated));
    }

    #[test]
    fn addresses_are_read_as_clients_write_them() {
        assert_eq!(parse("nbd://localhost"), tcp("localhost", PORT));
        assert_eq!(parse("nbd://[::1]:7/"), tcp("::1", 7));
        let unix = Ok(Address::Unix("/run/x".into()));
        assert_eq!(parse("nbd+unix:///?socket=/run/x"), unix);
        assert_eq!(parse("nbd+vsock://2:7"), parse("vsock:2:7"));
        assert!(parse("nbd://host/disk").unwrap_err().contains("--export"));
        assert!(parse("nbds://host").unwrap_err().contains("--tls"));
        let error = parse("tcp:10820").unwrap_err();
        assert!(error.contains("write 'tcp::10820'"), "{error}");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for bad in [
            "",
            "unix:",
            "/run/x",
            "tcp",
            "tcp:h:",
            "tcp:h:x",
            "tcp:h:65536",
            "tcp:::1:7",
            "tcp:[::1",
            "tcp:[::1]7",
            "tcp:[host]:7",
            "vsock:x:1",
            "vsock:1:4294967296",
            "vsock:4294967296:1",
            "fd:",
            "fd:-1",
            "udp:h:1",
            "tcp:10809",
            "nbd+unix://host/?socket=/x",
            "nbd+unix:///?socket=",
            "http://host",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_survive_a_round_trip() {
        for text in [
            "unix:/x",
            "tcp:[::1]:7",
            "tcp:h:7",
            "tcp::7",
            "vsock:any:7",
            "fd:7",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_tcp_port_is_listened_at() {
        for host in ["127.0.0.1", "localhost", ""] {
            let listeners = listen_at(&tcp(host, 0).unwrap(), Access::default()).unwrap();
            assert!(!listeners.is_empty());
            for listener in &listeners {
                let name = local_name(listener).unwrap();
                let addr = name.strip_prefix("tcp:").unwrap();
                TcpStream::connect(addr).unwrap();
                let again = parse(&name).unwrap();
                let error = listen_at(&again, Access::default())
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("in use by this server itself"), "{error}");
            }
        }
    }

    #[test]
    fn all_addresses_of_the_machine_means_both_kinds() {
        let listener = &listen_at(&tcp("", 0).unwrap(), Access::default()).unwrap()[0];
        let name = local_name(listener).unwrap();
        let port: u16 = name.rsplit_once(':').unwrap().1.parse().unwrap();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        if std::net::TcpListener::bind("[::1]:0").is_ok() {
            TcpStream::connect(("::1", port)).unwrap();
        }
    }

    #[test]
    fn a_host_that_does_not_exist_is_an_error() {
        let error =
            listen_at(&tcp("no-such-host.invalid", 7).unwrap(), Access::default()).unwrap_err();
        assert!(
            error.to_string().contains("no-such-host.invalid"),
            "{error}"
        );
    }
}
