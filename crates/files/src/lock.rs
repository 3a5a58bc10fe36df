//! Image locks compatible with QEMU, so that no two processes write to an image at the same time.
//!
//! QEMU (block/file-posix.c) locks single bytes of the image file with shared OFD locks. A lock on
//! byte 100 + n means "I use permission n". A lock on byte 200 + n means "I do not share permission
//! n". Before a process uses the image, it tests the opposite bytes for locks of others.

use crate::holder;
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const USED: i64 = 100;
const UNSHARED: i64 = 200;

/// QEMU's permissions by number: BLK_PERM_CONSISTENT_READ and so on.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Number of bytes in each range that can be locked; QEMU has permissions 0 to 4.
const PERMISSIONS: i64 = 5;

/// How a process uses an image, and what it permits others.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    /// Whether the process writes to the image.
    pub writes: bool,
    /// Whether others may write to the image meanwhile.
    pub share: bool,
}

impl Use {
    fn used(self) -> impl Iterator<Item = i64> {
        let writes = self.writes.then_some(WRITE);
        [CONSISTENT_READ].into_iter().chain(writes)
    }

    fn unshared(self) -> impl Iterator<Item = i64> {
        let denied: &[i64] = if self.share { &[] } else { &[WRITE, RESIZE] };
        denied.iter().copied()
    }
}

/// Why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Names the process that holds the lock, if it is known.
    #[error("in use by {0}")]
    InUse(String),
    /// The lock cannot be taken for another reason.
    #[error("cannot lock the file: {}", cause(.0))]
    Os(io::Error),
}

/// Time to wait for an image that is in use.
///
/// A killed process keeps its locks until the kernel has finished its I/O in flight. Until then its
/// writes could overtake the writes of its successor.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time between two attempts to lock an image.
const AGAIN: Duration = Duration::from_millis(10);

/// Takes the locks, or fails and holds none. `path` is the file's name in messages.
///
/// The locks last until [`release`], or until every duplicate of `file` is closed.
pub fn take(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    told(file, lock(path, file, how)?)
}

/// Takes the locks like [`take`], but waits a few seconds for a predecessor to release them.
pub fn take_over(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    let start = Instant::now();
    loop {
        match lock(path, file, how)? {
            Some(_) if start.elapsed() < PATIENCE => std::thread::sleep(AGAIN),
            outcome => return told(file, outcome),
        }
    }
}

/// Fails if locks of others forbid this use; takes no lock.
pub fn check(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    told(file, conflict(path, file, how)?)
}

/// Converts the outcome of an attempt to a result; a byte in it has a conflicting lock.
fn told(file: &File, outcome: Option<i64>) -> Result<(), LockError> {
    let Some(byte) = outcome else {
        return Ok(());
    };
    Err(LockError::InUse(match holder::find(file, byte) {
        Some(holder) => holder.to_string(),
        None if holder::is_this_process(file, byte) => "this process itself".into(),
        None => "another process, for example QEMU".into(),
    }))
}

/// Takes the locks and returns `None`, or takes none and returns the byte with a conflicting lock.
fn lock(path: &Path, file: &File, how: Use) -> Result<Option<i64>, LockError> {
    if let Some(byte) = set_all(path, file, how)? {
        return Ok(Some(byte));
    }
    let others = conflict(path, file, how);
    if !matches!(others, Ok(None)) {
        release(path, file);
    }
    others
}

/// Locks all bytes or none, without a check for conflicting uses.
///
/// Returns the byte that another program has locked exclusively, if there is one.
fn set_all(path: &Path, file: &File, how: Use) -> Result<Option<i64>, LockError> {
    let used = how.used().map(|n| USED + n);
    let unshared = how.unshared().map(|n| UNSHARED + n);
    for byte in used.chain(unshared) {
        let failed = match set(file, libc::F_RDLCK, byte, 1) {
            Ok(()) => continue,
            // QEMU's locks are shared, so only a program other than QEMU can conflict here.
            Err(error) if is_conflict(&error) => Ok(Some(byte)),
            Err(error) => without_locks(path, error).map(|()| None),
        };
        release(path, file);
        return failed;
    }
    Ok(None)
}

/// Returns a byte with a lock of another open file that forbids this use.
fn conflict(path: &Path, file: &File, how: Use) -> Result<Option<i64>, LockError> {
    let denied_to_us = how.used().map(|n| UNSHARED + n);
    let denied_by_us = how.unshared().map(|n| USED + n);
    for byte in denied_to_us.chain(denied_by_us) {
        match is_locked_by_others(file, byte) {
            Ok(false) => {}
            Ok(true) => return Ok(Some(byte)),
            Err(error) => return without_locks(path, error).map(|()| None),
        }
    }
    Ok(None)
}

/// Releases all locks.
pub fn release(path: &Path, file: &File) {
    for base in [USED, UNSHARED] {
        if let Err(error) = set(file, libc::F_UNLCK, base, PERMISSIONS) {
            tracing::warn!("{}: cannot unlock: {}", path.display(), cause(error));
        }
    }
}

/// Accepts file systems without locks, with a warning; QEMU accepts them, too.
fn without_locks(path: &Path, error: io::Error) -> Result<(), LockError> {
    match error.raw_os_error() {
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
            tracing::warn!(
                "{}: cannot lock ({}); make sure that no other program writes to it",
                path.display(),
                cause(error)
            );
            Ok(())
        }
        _ => Err(LockError::Os(error)),
    }
}

fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

fn lock_of(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        // OFD locks require a PID of 0.
        l_pid: 0,
    }
}

fn set(file: &File, kind: libc::c_int, start: i64, len: i64) -> io::Result<()> {
    let lock = lock_of(kind, start, len);
    // SAFETY: F_OFD_SETLK reads one flock.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether any other open file holds a lock on this byte.
fn is_locked_by_others(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, byte, 1);
    // SAFETY: F_OFD_GETLK reads and writes one flock.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_testing::Deadline;

    #[test]
    fn a_lock_of_this_process_is_told_as_such() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let open = || {
            let mut options = File::options();
            options.read(true).write(true).open(image.path()).unwrap()
        };
        let how = Use {
            writes: true,
            share: false,
        };
        let (first, second) = (open(), open());
        take(image.path(), &first, how).unwrap();
        for attempt in [take, check] {
            let deadline = Deadline::new("a refusal that names this process");
            loop {
                let error = attempt(image.path(), &second, how).unwrap_err();
                let error = error.to_string();
                if error == "in use by this process itself" {
                    break;
                }
                // Child processes of other tests hold the image open until they call execve(2).
                deadline.check_with(|| error);
                deadline.pause();
            }
        }
        check(image.path(), &first, how).unwrap();
        release(image.path(), &first);
        take(image.path(), &second, how).unwrap();
    }
}
