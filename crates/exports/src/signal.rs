//! A flag with a file descriptor that can be polled.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Raised by any thread, and lowered by one thread.
pub struct Signal(OwnedFd);

impl Signal {
    pub fn new() -> io::Result<Signal> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Signal(eventfd(0, flags)?))
    }

    pub fn raise(&self) {
        // The eventfd's counter cannot overflow, because each call adds 1.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the file descriptor unreadable until the next call of [`Signal::raise`].
    pub fn lower(&self) {
        // The read fails if the flag is not raised.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
