//! Finds the process at the other end of a Unix socket with the kernel's socket diagnostics
//! (sock_diag(7), struct unix_diag_req of linux/unix_diag.h).

use std::collections::{HashMap, HashSet};
use std::fs;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use crate::error::{Context, Result};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const AF_UNIX: u8 = 1;
const SHOW_NAME: u32 = 1;
const SHOW_PEER: u32 = 4;
const ATTR_NAME: u16 = 0;
const ATTR_PEER: u16 = 2;
/// Sizes in bytes of struct nlmsghdr and struct unix_diag_msg.
const HEADER: usize = 16;
const MESSAGE: usize = 16;

/// A Unix socket of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Socket {
    pub inode: u64,
    pub peer: Option<u64>,
    /// Path to which the socket, or the listening socket that accepted it, is bound.
    pub name: Option<String>,
}

/// Returns all Unix sockets.
///
/// # Errors
/// When the kernel does not have these diagnostics.
pub(super) fn all() -> Result<Vec<Socket>> {
    let what = || "cannot ask the kernel for its Unix sockets (CONFIG_UNIX_DIAG)".to_owned();
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )
    .context(what)?;
    send(&socket, &request(), SendFlags::empty()).context(what)?;
    let mut sockets = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty()).context(what)?;
        match parse(&buffer[..length], &mut sockets) {
            Some(true) if length > 0 => {}
            Some(_) => return Ok(sockets),
            None => {
                let refused = std::io::Error::from(std::io::ErrorKind::Unsupported);
                return Err(refused).context(what);
            }
        }
    }
}

fn request() -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(40u32.to_ne_bytes()); // the length of the whole message
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    bytes.extend([0; 8]); // sequence, port
    bytes.extend([AF_UNIX, 0, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // sockets in any state
    bytes.extend(0u32.to_ne_bytes()); // any inode
    bytes.extend((SHOW_NAME | SHOW_PEER).to_ne_bytes());
    bytes.extend([0xff; 8]); // no cookie
    bytes
}

/// Appends the sockets of one datagram. Returns false after the last datagram, and `None` if the
/// kernel has rejected the request.
fn parse(mut bytes: &[u8], sockets: &mut Vec<Socket>) -> Option<bool> {
    while bytes.len() >= HEADER {
        let length = u32_at(bytes, 0)? as usize;
        match u16_at(bytes, 4)? {
            NLMSG_DONE => return Some(false),
            NLMSG_ERROR => return None,
            SOCK_DIAG_BY_FAMILY => {
                let body = bytes.get(HEADER..length.max(HEADER));
                sockets.extend(body.and_then(socket_of));
            }
            _ => {}
        }
        bytes = bytes
            .get(length.max(HEADER).next_multiple_of(4)..)
            .unwrap_or(&[]);
    }
    Some(true)
}

fn socket_of(body: &[u8]) -> Option<Socket> {
    let mut socket = Socket {
        inode: u64::from(u32_at(body, 4)?),
        ..Socket::default()
    };
    let mut attributes = body.get(MESSAGE..)?;
    while attributes.len() >= 4 {
        let length = usize::from(u16_at(attributes, 0)?).max(4);
        let value = attributes.get(4..length)?;
        match u16_at(attributes, 2)? {
            ATTR_PEER => socket.peer = u32_at(value, 0).map(u64::from),
            ATTR_NAME => {
                let path = value.split(|&byte| byte == 0).next()?;
                socket.name = Some(String::from_utf8_lossy(path).into_owned());
            }
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some(socket)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the inodes of the sockets that a process has open.
pub(super) fn inodes_of(pid: u32) -> HashSet<u64> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let inode = |entry: fs::DirEntry| {
        let link = fs::read_link(entry.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        inode.parse().ok()
    };
    entries.flatten().filter_map(inode).collect()
}

/// Returns the process that has the socket with this inode open. If there are several, such as a
/// parent that has not closed it, returns the one with the highest process id.
pub(super) fn owner_of(inode: u64) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?;
    let pids = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut owners: Vec<u32> = pids
        .filter(|&pid| inodes_of(pid).contains(&inode))
        .collect();
    owners.sort_unstable();
    owners.pop()
}

/// Returns the process at the other end of a process's connection over the socket at `path`. Either
/// of the two may be the listener.
pub(super) fn peer_over(pid: u32, path: &str, sockets: &[Socket]) -> Option<u32> {
    let ours = inodes_of(pid);
    let by_inode: HashMap<u64, &Socket> = sockets.iter().map(|one| (one.inode, one)).collect();
    let is_named = |socket: &Socket| socket.name.as_deref() == Some(path);
    sockets
        .iter()
        .filter(|socket| ours.contains(&socket.inode))
        .find_map(|socket| {
            let peer = by_inode.get(&socket.peer?)?;
            let is_it = is_named(socket) || is_named(peer);
            if is_it { owner_of(peer.inode) } else { None }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn the_other_end_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let _ours = UnixStream::connect(&path).unwrap();
        let (_theirs, _) = listener.accept().unwrap();
        let sockets = all().unwrap();
        let name = path.to_str().unwrap();
        let pid = std::process::id();
        // Child processes that other tests start also hold the socket until they call exec.
        fathom_testing::until("this process as the socket's only one", || {
            peer_over(pid, name, &sockets) == Some(pid)
        });
        assert_eq!(peer_over(pid, "/nowhere", &sockets), None);
    }

    proptest! {
        #[test]
        fn no_answer_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut sockets = Vec::new();
            let _ = parse(&bytes, &mut sockets);
            prop_assert!(sockets.len() <= bytes.len());
            let mut framed = (bytes.len() as u32 + 16).to_ne_bytes().to_vec();
            framed.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
            framed.extend([0; 10]);
            framed.extend(&bytes);
            let _ = parse(&framed, &mut sockets);
        }
    }
}
