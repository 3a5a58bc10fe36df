//! Ends the session of a mounted file, even while programs have the file open.
//!
//! The session thread waits in read(2) on `/dev/fuse`, and only the end of the mount ends that. A
//! mount ends when its file is closed everywhere, or when all duplicates of `/dev/fuse` have been
//! closed. A duplicate is not closed while a read(2) is in progress on it. To end the session,
//! [`Device::end`] therefore replaces the session's descriptor by `/dev/null`, and has the kernel
//! send a request that wakes the session thread up. The next read(2) returns nothing, which ends
//! the session.

use fuser::{Filesystem, Session};
use rustix::io::write;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// Code of a message that asks the kernel for cached data, from linux/fuse.h.
const FUSE_NOTIFY_RETRIEVE: i32 = 5;

/// Number of the root inode, from linux/fuse.h.
const FUSE_ROOT_ID: u64 = 1;

/// A duplicate of a session's `/dev/fuse`.
pub(super) struct Device {
    own: OwnedFd,
    session: RawFd,
    /// Keeps the session's descriptor open.
    _alive: fuser::Notifier,
    /// Opened in advance: the sandbox may forbid to open files later.
    null: File,
}

impl Device {
    pub(super) fn of<F: Filesystem>(session: &Session<F>) -> io::Result<Device> {
        let device = session.as_fd();
        Ok(Device {
            own: device.try_clone_to_owned()?,
            session: device.as_raw_fd(),
            _alive: session.notifier(),
            null: File::open("/dev/null")?,
        })
    }

    /// Ends the session. The mount ends when the session thread has noticed it.
    pub(super) fn end(self) {
        // SAFETY: dup3(2) uses no memory. The session's descriptor is open, as `_alive` owns it.
        // The session only reads from and writes to the descriptor, which `/dev/null` permits.
        let replaced = unsafe { libc::dup3(self.null.as_raw_fd(), self.session, libc::O_CLOEXEC) };
        if replaced < 0 {
            let error = io::Error::last_os_error();
            tracing::error!("fuse: cannot end a session: {error}");
        }
        // (Fails if the mount has ended, and the session thread is awake then.)
        let _ = write(&self.own, &wake_up());
    }
}

/// Returns a message to which the kernel replies by a request: `fuse_out_header` and
/// `fuse_notify_retrieve_out`, see linux/fuse.h.
fn wake_up() -> [u8; 48] {
    let mut message = [0; 48];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &48u32.to_ne_bytes());
    put(4, &FUSE_NOTIFY_RETRIEVE.to_ne_bytes());
    // Offset and length of the data, at the end of the message, are 0.
    put(24, &FUSE_ROOT_ID.to_ne_bytes());
    message
}
