//! Image locks that QEMU understands, so that two processes do not write to
//! one image at once.
//!
//! QEMU (block/file-posix.c) locks single bytes of the image file with OFD
//! locks, all of them shared: byte 100 + n says "I use permission n", byte
//! 200 + n says "I do not let others use permission n". Before it starts,
//! a process tests the opposite bytes for locks of others.

use fathom_core::DiskError;
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
pub(super) struct Use {
    pub(super) writes: bool,
    /// Others may write meanwhile.
    pub(super) share: bool,
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

/// How long to wait for an image that is in use. A process that was killed
/// keeps its locks until the kernel has done what it had in flight, and until
/// then its writes may still overtake those of its successor.
const PATIENCE: Duration = Duration::from_secs(3);

fn patiently(attempt: impl Fn() -> Result<(), DiskError>) -> Result<(), DiskError> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(DiskError::Unusable { .. }) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => return outcome,
        }
    }
}

/// Take the locks, or fail and leave none. May wait a few seconds for a
/// predecessor to end.
pub(super) fn take(path: &Path, file: &File, how: Use) -> Result<(), DiskError> {
    patiently(|| try_to_take(path, file, how))
}

/// Lock an image that a tool has opened, until `file` is closed. Unlike a
/// daemon, which takes over from a predecessor, a tool does not wait.
pub fn lock_image(path: &Path, file: &File, writes: bool) -> Result<(), DiskError> {
    let share = false;
    try_to_take(path, file, Use { writes, share })
}

/// Likewise, when the caller has it locked for writing through another open
/// file: so it stays locked when that one is closed, and nobody comes between.
pub fn lock_image_too(path: &Path, file: &File) -> Result<(), DiskError> {
    let (writes, share) = (true, false);
    lock(path, file, Use { writes, share }, || Ok(()))
}

fn try_to_take(path: &Path, file: &File, how: Use) -> Result<(), DiskError> {
    lock(path, file, how, || try_to_check(path, file, how))
}

/// Lock the bytes, and give them up again if `check` fails.
fn lock(
    path: &Path,
    file: &File,
    how: Use,
    check: impl FnOnce() -> Result<(), DiskError>,
) -> Result<(), DiskError> {
    let used = how.used().map(|n| USED + n);
    let unshared = how.unshared().map(|n| UNSHARED + n);
    let locked = used
        .chain(unshared)
        .try_for_each(|byte| set(file, libc::F_RDLCK, byte, 1));
    let taken = match locked {
        Ok(()) => check(),
        // Locks are shared: only something that is not QEMU can conflict.
        Err(error) if is_conflict(&error) => Err(in_use(path, how)),
        Err(error) => return without_locks(path, error),
    };
    if taken.is_err() {
        release(path, file);
    }
    taken
}

/// Fail when others' locks forbid this use; take none. May wait likewise.
pub(super) fn check(path: &Path, file: &File, how: Use) -> Result<(), DiskError> {
    patiently(|| try_to_check(path, file, how))
}

fn try_to_check(path: &Path, file: &File, how: Use) -> Result<(), DiskError> {
    let denied_to_us = how.used().map(|n| UNSHARED + n);
    let denied_by_us = how.unshared().map(|n| USED + n);
    for byte in denied_to_us.chain(denied_by_us) {
        match is_locked_by_others(file, byte) {
            Ok(false) => {}
            Ok(true) => return Err(in_use(path, how)),
            Err(error) => return without_locks(path, error),
        }
    }
    Ok(())
}

/// Give all locks up.
pub(super) fn release(path: &Path, file: &File) {
    for base in [USED, UNSHARED] {
        if let Err(error) = set(file, libc::F_UNLCK, base, PERMISSIONS) {
            tracing::warn!("{}: cannot be unlocked: {error}", path.display());
        }
    }
}

fn in_use(path: &Path, how: Use) -> DiskError {
    let mut problem = "is in use by another process, for example QEMU".to_owned();
    if !how.writes {
        problem += "; --force-share reads it nevertheless";
    }
    DiskError::Unusable {
        path: path.to_owned(),
        problem,
    }
}

/// Some file systems have no locks; QEMU does without them, too.
fn without_locks(path: &Path, error: io::Error) -> Result<(), DiskError> {
    match error.raw_os_error() {
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
            tracing::warn!(
                "{}: cannot be locked ({error}): make sure that nobody else writes to it",
                path.display()
            );
            Ok(())
        }
        _ => Err(DiskError::Io {
            path: path.to_owned(),
            what: "cannot be locked",
            source: error,
        }),
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
