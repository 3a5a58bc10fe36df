//! Determines the rights of a client by its user and groups, which the kernel reports.

use fathom_spec::Group;
use rustix::process::geteuid;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use tokio::net::UnixStream;

/// Groups that may use the API. Root and the server's user always may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// ID of the group whose members may do everything.
    pub all: Option<u32>,
    /// ID of the group whose members may read everything.
    pub read: Option<u32>,
}

/// Rights of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    All,
    Read,
    Nothing,
}

impl Groups {
    /// Creates the groups. Members of `all` may do everything, and members of `read` may read.
    pub fn new(all: Option<Group>, read: Option<Group>) -> Groups {
        let id = |group: Option<Group>| group.map(|group| group.0);
        Groups {
            all: id(all),
            read: id(read),
        }
    }

    /// Returns the rights of a client.
    pub fn rights(&self, client: &UnixStream) -> io::Result<Rights> {
        let peer = client.peer_cred()?;
        if peer.uid() == 0 || peer.uid() == geteuid().as_raw() {
            return Ok(Rights::All);
        }
        // SAFETY: the socket stays open while `client` is borrowed.
        let socket = unsafe { BorrowedFd::borrow_raw(client.as_raw_fd()) };
        let mut groups = more_groups(socket)?;
        groups.push(peer.gid());
        Ok(self.of(&groups))
    }

    fn of(&self, groups: &[u32]) -> Rights {
        let has = |group: Option<u32>| group.is_some_and(|group| groups.contains(&group));
        match (has(self.all), has(self.read)) {
            (true, _) => Rights::All,
            (_, true) => Rights::Read,
            _ => Rights::Nothing,
        }
    }
}

/// Supplementary groups of a socket's peer, as it connected (SO_PEERGROUPS).
fn more_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let get = |groups: *mut u32, len: &mut libc::socklen_t| {
        // SAFETY: the kernel writes at most `len` bytes to `groups`, which has room for them, and
        // the bytes that there are to `len`.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.cast(),
                len,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let mut len = 0;
    match get(ptr::null_mut(), &mut len) {
        Ok(()) => return Ok(Vec::new()),
        // `len` is what is needed; a peer's groups never change.
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => {}
        Err(error) => return Err(error),
    }
    let mut groups = vec![0; len as usize / size_of::<u32>()];
    get(groups.as_mut_ptr(), &mut len)?;
    groups.truncate(len as usize / size_of::<u32>());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_rights() {
        let groups = Groups {
            all: Some(5),
            read: Some(6),
        };
        assert_eq!(groups.of(&[1, 5, 6]), Rights::All);
        assert_eq!(groups.of(&[6, 1]), Rights::Read);
        assert_eq!(groups.of(&[1]), Rights::Nothing);
        assert_eq!(Groups::default().of(&[0, 1]), Rights::Nothing);
    }
}
