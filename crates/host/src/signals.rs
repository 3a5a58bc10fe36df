//! SIGTERM, SIGINT and SIGHUP as something to poll for.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Readable once the process was asked to end.
pub struct Termination(UnixStream);

impl Termination {
    /// From now on the first signal makes this readable; a second one ends
    /// the process at once, should draining take too long for somebody.
    pub fn new() -> io::Result<Termination> {
        let (reader, writer) = UnixStream::pair()?;
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // The order matters: the first signal must not find its own mark.
            flag::register_conditional_shutdown(signal, 1, asked.clone())?;
            flag::register(signal, asked.clone())?;
            low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        Ok(Termination(reader))
    }
}

impl AsFd for Termination {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Readable when SIGHUP has come: the configuration is to be read again.
pub struct Reload(UnixStream);

impl Reload {
    pub fn new() -> io::Result<Reload> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        low_level::pipe::register(SIGHUP, writer)?;
        Ok(Reload(reader))
    }

    /// Whether it has come since this was asked last.
    pub fn take(&self) -> bool {
        let mut signals = [0; 64];
        matches!((&self.0).read(&mut signals), Ok(1..))
    }
}

impl AsFd for Reload {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// While this lives, threads are started that leave these signals to the
/// one which starts them: they are not interrupted in their system calls, and
/// two signals are handled one after the other.
pub struct LeftToThisThread {
    before: libc::sigset_t,
}

impl LeftToThisThread {
    pub fn begin() -> LeftToThisThread {
        let mut set = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: sigemptyset(3) initialises the set, which the others then
        // may use; `before` is written by pthread_sigmask(3), which cannot
        // fail with valid arguments.
        let before = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), SIGTERM);
            libc::sigaddset(set.as_mut_ptr(), SIGINT);
            libc::sigaddset(set.as_mut_ptr(), SIGHUP);
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        LeftToThisThread { before }
    }
}

impl Drop for LeftToThisThread {
    fn drop(&mut self) {
        // SAFETY: a mask that pthread_sigmask(3) gave; the old one is not
        // asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
