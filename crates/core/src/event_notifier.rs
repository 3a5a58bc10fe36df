//! Wakes a thread that waits for a file descriptor.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// An eventfd that any thread makes readable, to wake the thread that polls it.
#[derive(Debug)]
pub struct EventNotifier(OwnedFd);

impl EventNotifier {
    /// Creates a notifier whose descriptor is not readable.
    ///
    /// # Errors
    /// The process or the system has too many open files.
    pub fn new() -> io::Result<EventNotifier> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventNotifier(eventfd(0, flags)?))
    }

    /// Makes the descriptor readable.
    pub fn notify(&self) {
        // The counter cannot overflow, because each call adds 1.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next [`EventNotifier::notify`]. Returns whether it
    /// was readable.
    pub fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for EventNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventNotifier {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
