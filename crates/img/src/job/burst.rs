//! Collects requests and submits them to a worker together.

use fathom_stack::{Client, DiskRequest};

/// Compressed writes that wait to be submitted to a client. Writes that are compressed at the same
/// time share blocks of the file. From a slow source, each write would complete before the next one
/// is submitted, if they were submitted one by one.
///
/// The caller must not wait for replies while all requests in flight are held here.
pub(crate) struct Burst {
    held: Vec<DiskRequest>,
    most: usize,
}

impl Burst {
    /// Creates a burst that submits its requests when it holds `most` of them.
    pub(crate) fn new(most: usize) -> Burst {
        Burst {
            held: Vec::with_capacity(most),
            most,
        }
    }

    pub(crate) fn push(&mut self, client: &Client, ask: DiskRequest) {
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
