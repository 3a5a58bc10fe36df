//! What other threads have for the daemon's own.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Its end of it.
pub struct Mailbox<T> {
    received: Receiver<T>,
    sender: Sender<T>,
    event: Arc<OwnedFd>,
}

/// For other threads.
pub struct Post<T> {
    sender: Sender<T>,
    event: Arc<OwnedFd>,
}

impl<T> Mailbox<T> {
    pub fn new() -> io::Result<Mailbox<T>> {
        let (sender, received) = channel();
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox {
            received,
            sender,
            event: Arc::new(event),
        })
    }

    pub fn post(&self) -> Post<T> {
        Post {
            sender: self.sender.clone(),
            event: self.event.clone(),
        }
    }

    /// What has come; then it is no longer readable until there is more.
    pub fn take(&self) -> Vec<T> {
        // It need not have been readable.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.received.try_iter().collect()
    }
}

/// Readable when something has come.
impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl<T> Post<T> {
    /// What comes after the daemon's end is lost.
    pub fn send(&self, message: T) {
        let _ = self.sender.send(message);
        // An eventfd's counter cannot overflow by ones.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}
