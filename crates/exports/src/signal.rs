//! A flag that can be polled for.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Raised by any thread, lowered by one.
pub struct Signal(OwnedFd);

impl Signal {
    pub fn new() -> io::Result<Signal> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Signal(eventfd(0, flags)?))
    }

    pub fn raise(&self) {
        // An eventfd's counter cannot overflow by ones.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// No longer readable until raised again.
    pub fn lower(&self) {
        // It need not have been raised.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
