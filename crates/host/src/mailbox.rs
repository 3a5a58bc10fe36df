//! A queue of messages from other threads to the control thread.

use fathom_core::EventNotifier;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The receiver.
pub struct Mailbox<T> {
    received: Receiver<T>,
    sender: Sender<T>,
    event: Arc<EventNotifier>,
}

/// A sender, for other threads.
pub struct Post<T> {
    sender: Sender<T>,
    event: Arc<EventNotifier>,
}

impl<T> Mailbox<T> {
    /// Creates an empty mailbox.
    ///
    /// # Errors
    /// The process or the system has too many open files.
    pub fn new() -> io::Result<Mailbox<T>> {
        let (sender, received) = channel();
        let event = EventNotifier::new()?;
        Ok(Mailbox {
            received,
            sender,
            event: Arc::new(event),
        })
    }

    /// Returns a new sender to this mailbox.
    pub fn post(&self) -> Post<T> {
        Post {
            sender: self.sender.clone(),
            event: self.event.clone(),
        }
    }

    /// Takes all messages. The mailbox is then not readable until the next message.
    pub fn take(&self) -> Vec<T> {
        self.event.clear();
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
        self.event.notify();
    }
}
