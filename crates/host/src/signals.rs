//! SIGTERM, SIGINT and SIGHUP as file descriptors for poll(2).

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A file descriptor that is readable after SIGTERM or SIGINT.
pub struct Termination(UnixStream);

impl Termination {
    /// Installs the handlers. The first signal makes the file descriptor readable. A second signal
    /// ends the process at once, for users who do not want to wait for requests in flight.
    pub fn new() -> io::Result<Termination> {
        let (reader, writer) = UnixStream::pair()?;
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // The order matters: the first signal must not see the flag that it sets itself.
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

/// A file descriptor that is readable after SIGHUP, which requests a reload of the configuration.
pub struct Reload(UnixStream);

impl Reload {
    /// Installs the handler of SIGHUP.
    ///
    /// # Errors
    /// The handler or its pipe cannot be created.
    pub fn new() -> io::Result<Reload> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        low_level::pipe::register(SIGHUP, writer)?;
        Ok(Reload(reader))
    }

    /// Whether SIGHUP has arrived since the last call.
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

/// Blocks these signals on the current thread while this value exists. Threads that are started
/// meanwhile inherit the mask and keep it. Signals interrupt none of their system calls, and
/// another thread handles the signals in turn.
pub struct LeftToThisThread {
    before: libc::sigset_t,
}

impl LeftToThisThread {
    /// Blocks SIGTERM, SIGINT and SIGHUP on the current thread.
    pub fn begin() -> LeftToThisThread {
        let mut set = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: sigemptyset(3) initialises the set before the other functions use it.
        // pthread_sigmask(3), which cannot fail with valid arguments, writes `before`.
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
        // SAFETY: the mask is one that pthread_sigmask(3) returned. A null pointer means that the
        // old mask is not returned.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
