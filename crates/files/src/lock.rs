//! Image locks that QEMU understands, so that two processes do not write to
//! one image at once.
//!
//! QEMU (block/file-posix.c) locks single bytes of the image file with OFD
//! locks, all of them shared: byte 100 + n says "I use permission n", byte
//! 200 + n says "I do not let others use permission n". Before it starts,
//! a process tests the opposite bytes for locks of others.

use crate::holder;
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const USED: i64 = 100;
const UNSHARED: i64 = 200;

/// QEMU's permissions, by number: BLK_PERM_CONSISTENT_READ and so on.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// All bytes that are ever locked; QEMU has permissions 0 to 4.
const PERMISSIONS: i64 = 5;

/// What a process does with an image and what others may not do.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    pub writes: bool,
    /// Others may write meanwhile.
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

/// Why an image is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// By whom, if that can be known.
    #[error("in use by {0}")]
    InUse(String),
    #[error("cannot lock the file: {}", cause(.0))]
    Os(io::Error),
}

/// How long to wait for an image that is in use. A process that was killed
/// keeps its locks until the kernel has done what it had in flight, and until
/// then its writes may still overtake those of its successor.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(10);

/// Take the locks, or fail and leave none. They last until [`release`], or
/// until all that was duplicated from `file` is closed. `path` is its name in
/// messages.
pub fn take(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    told(file, lock(path, file, how)?)
}

/// Likewise, but wait a few seconds for a predecessor to end.
pub fn take_over(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    let start = Instant::now();
    loop {
        match lock(path, file, how)? {
            Some(_) if start.elapsed() < PATIENCE => std::thread::sleep(AGAIN),
            outcome => return told(file, outcome),
        }
    }
}

/// Fail when others' locks forbid this use; take none.
pub fn check(path: &Path, file: &File, how: Use) -> Result<(), LockError> {
    told(file, conflict(path, file, how)?)
}

/// An attempt's outcome for the caller: none, or the byte that is in the way.
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

/// Take the locks, or none and tell which byte is in the way.
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

/// Lock the bytes, all or none, whatever others have.
fn set_all(path: &Path, file: &File, how: Use) -> Result<Option<i64>, LockError> {
    let used = how.used().map(|n| USED + n);
    let unshared = how.unshared().map(|n| UNSHARED + n);
    for byte in used.chain(unshared) {
        let failed = match set(file, libc::F_RDLCK, byte, 1) {
            Ok(()) => continue,
            // Locks are shared: only something that is not QEMU can conflict.
            Err(error) if is_conflict(&error) => Ok(Some(byte)),
            Err(error) => without_locks(path, error).map(|()| None),
        };
        release(path, file);
        return failed;
    }
    Ok(None)
}

/// The byte of somebody's lock that forbids this use.
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

/// Give all locks up.
pub fn release(path: &Path, file: &File) {
    for base in [USED, UNSHARED] {
        if let Err(error) = set(file, libc::F_UNLCK, base, PERMISSIONS) {
            tracing::warn!("{}: cannot unlock: {}", path.display(), cause(error));
        }
    }
}

/// Some file systems have no locks; QEMU does without them, too.
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
        // OFD locks want 0.
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

/// Whether anyone else holds any lock on this byte.
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
                // Programs that other tests start have the image open, too, until they exec.
                deadline.check_with(|| error);
                deadline.pause();
            }
        }
        check(image.path(), &first, how).unwrap();
        release(image.path(), &first);
        take(image.path(), &second, how).unwrap();
    }
}
