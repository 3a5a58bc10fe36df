//! Checks which files of a front-end may be mapped.
//!
//! A worker that touches a page waits until the page's file system has responded, and so does the
//! kernel when this process exits. Memory files never wait: a userfaultfd of the front-end covers
//! only its own mappings, not ours. FUSE may wait for ever. A user who may start a virtual machine
//! may usually mount FUSE, or an overlay on it. Therefore the type of a file system is checked
//! before anything is asked of it.
//!
//! A received descriptor of a FUSE file must also be closed, and the file system may delay that
//! close (flush) without limit. Only the session that received the descriptor, and the exit of this
//! process, wait for it. The administrator can abort the FUSE connection.

use super::mapping::MapError;
use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx};
use std::os::fd::BorrowedFd;

/// File systems that read pages from local devices only.
const LOCAL: [&str; 11] = [
    "bcachefs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "ramfs",
    "tmpfs",
    "xfs",
    "zfs",
];

/// Refuses a file whose pages may never become available.
pub fn check(fd: BorrowedFd<'_>) -> Result<(), MapError> {
    // Only tmpfs and hugetlbfs support seals, and memory files are of these types.
    if fcntl_get_seals(fd).is_ok() {
        return Ok(());
    }
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat =
        statx(fd, "", flags, StatxFlags::TYPE | StatxFlags::MNT_ID).map_err(|e| MapError::Io {
            what: "statx failed",
            source: e.into(),
        })?;
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => {}
        // A DAX device.
        FileType::CharacterDevice => return Ok(()),
        other => return Err(MapError::NotMemory(other)),
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(|e| MapError::Io {
        what: "cannot read the type of its file system",
        source: e,
    })?;
    match file_system(&mounts, stat.stx_mnt_id) {
        Some(name) if LOCAL.contains(&name) => Ok(()),
        name => Err(MapError::MayWait(name.unwrap_or("unknown here").to_owned())),
    }
}

/// Returns the type of a mounted file system (proc_pid_mountinfo(5)).
fn file_system(mounts: &str, id: u64) -> Option<&str> {
    let id = id.to_string();
    let line = mounts
        .lines()
        .find(|line| line.split(' ').next() == Some(&*id))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounts_type_is_found() {
        let mounts = "\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
220 22 0:44 / /mnt/a\\040b rw,nosuid - fuse.sshfs host:/ rw,user_id=0\n";
        assert_eq!(file_system(mounts, 22), Some("ext4"));
        assert_eq!(file_system(mounts, 220), Some("fuse.sshfs"));
        assert_eq!(file_system(mounts, 2), None);
    }
}
