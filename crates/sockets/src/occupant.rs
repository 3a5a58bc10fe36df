//! Which process listens at an address.

use rustix::net::sockopt;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;

/// The state of a listening socket in /proc/net/tcp.
const LISTENING: &str = "0A";

/// Result of [`at_tcp`] and [`at_unix`] for this process.
const OWN: &str = "this server itself";

/// Returns the remedy for an address that is in use by `by`. `what` is a path or a port.
pub fn remedy(by: &str, what: &str) -> String {
    match by {
        OWN => format!("choose another {what}"),
        _ => format!("stop that process, or choose another {what}"),
    }
}

/// Names the process that listens at a TCP address: `nbdkit (process 17)`, or `another process` if
/// /proc does not say: a server that is not root's sees only the sockets of its own user's
/// processes.
pub fn at_tcp(address: SocketAddr) -> String {
    let inodes = listeners(address);
    let pid = own_and_others().find(|pid| inodes.iter().any(|inode| has_socket(*pid, inode)));
    named(pid)
}

/// Names the process that listens at the Unix socket to which `connection` is connected.
pub fn at_unix(connection: impl AsFd) -> String {
    let peer = sockopt::socket_peercred(connection).ok();
    named(peer.map(|peer| peer.pid.as_raw_pid().unsigned_abs()))
}

fn named(pid: Option<u32>) -> String {
    let Some(pid) = pid else {
        return "another process".to_owned();
    };
    if pid == std::process::id() {
        return OWN.to_owned();
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim_end() {
        "" => format!("process {pid}"),
        name if name.contains(char::is_control) => format!("process {pid}"),
        name => format!("{name} (process {pid})"),
    }
}

/// The inodes of the sockets that listen at this address, or at all addresses with its port.
fn listeners(address: SocketAddr) -> Vec<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    let text = tables.into_iter().flatten().collect::<String>();
    let lines = text.lines().filter_map(|line| listener(line, address));
    lines.map(ToOwned::to_owned).collect()
}

/// The inode of a line of /proc/net/tcp, if the line is about a socket that listens at `address`:
/// `0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 4711 1 ...`.
fn listener(line: &str, address: SocketAddr) -> Option<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (ip, port) = words.get(1)?.split_once(':')?;
    let is_port = u16::from_str_radix(port, 16).ok()? == address.port();
    let ip = ip_of(ip)?;
    let is_ip = ip.is_unspecified() || address.ip().is_unspecified() || ip == address.ip();
    (is_port && is_ip && words.get(3) == Some(&LISTENING)).then(|| words.get(9).copied())?
}

/// An address as /proc/net/tcp writes it: words of 32 bits in the byte order of this machine.
fn ip_of(text: &str) -> Option<IpAddr> {
    let words = text.len() / 8;
    let mut bytes = Vec::new();
    for word in 0..words {
        let word = u32::from_str_radix(text.get(8 * word..8 * word + 8)?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    match words {
        1 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        4 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical()),
        _ => None,
    }
}

/// The ids of all processes that /proc shows.
fn own_and_others() -> impl Iterator<Item = u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn has_socket(pid: u32, inode: &str) -> bool {
    let link = format!("socket:[{inode}]");
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter();
    let mut open = open.flatten().flatten();
    open.any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == Path::new(&link)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let line = "   0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000  \
                    1000        0 4711 1 ffff 100 0 0 10 0";
        let at = |text: &str| listener(line, text.parse().unwrap());
        if cfg!(target_endian = "little") {
            assert_eq!(at("127.0.0.1:10809"), Some("4711"));
            assert_eq!(at("0.0.0.0:10809"), Some("4711"));
            assert_eq!(at("127.0.0.2:10809"), None);
            assert_eq!(at("127.0.0.1:10810"), None);
        }
        let connected = line.replace(" 0A ", " 01 ");
        assert_eq!(
            listener(&connected, "127.0.0.1:10809".parse().unwrap()),
            None
        );
        for other in ["", "sl  local_address rem_address", "0: x:y z 0A"] {
            assert_eq!(listener(other, "127.0.0.1:1".parse().unwrap()), None);
        }
    }

    #[test]
    fn listening_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(at_tcp(address), "this server itself");
        drop(listener);
        assert_eq!(at_tcp(address), "another process");
    }
}
