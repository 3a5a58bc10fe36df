//! Requests that reach a worker together.

use fathom_stack::{Ask, Client};

/// Compressed writes on their way to a client. Those that are being compressed together share blocks
/// of the file: of a slow source, handed on one by one, each would be written before the next has
/// come.
///
/// Nobody may wait for answers when all that is under way is held here.
pub(crate) struct Burst {
    held: Vec<Ask>,
    most: usize,
}

impl Burst {
    /// Of so many at most.
    pub(crate) fn new(most: usize) -> Burst {
        Burst {
            held: Vec::with_capacity(most),
            most,
        }
    }

    pub(crate) fn push(&mut self, client: &Client, ask: Ask) {
        self.held.push(ask);
        if self.held.len() >= self.most {
            self.release(client);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn release(&mut self, client: &Client) {
        client.ask_all(self.held.drain(..));
    }
}
