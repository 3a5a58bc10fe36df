//! A queue of messages from other threads to the control thread.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The receiver.
pub struct Mailbox<T> {
    received: Receiver<T>,
    sender: Sender<T>,
    event: Arc<OwnedFd>,
}

/// A sender, for other threads.
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

    /// Takes all messages. The mailbox is then not readable until the next message.
    pub fn take(&self) -> Vec<T> {
        // (The eventfd may already be at zero.)
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.received.try_iter().collect()
    }
}

/// Readable when there is a message.
impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl<T> Post<T> {
    /// Sends a message. Messages after the end of the receiver are lost.
    pub fn send(&self, message: T) {
        let _ = self.sender.send(message);
        // An eventfd's counter cannot overflow by ones.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}
