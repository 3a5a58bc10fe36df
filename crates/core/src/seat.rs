//! A pool's thread, as the owners of its workers see it.

use crate::mailbox::{Message, Outbox};
use crate::thread::{Started, ThreadId};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::JoinHandle;

/// A thread of a pool. Ends the thread when dropped.
pub(crate) struct PoolThread {
    outbox: Outbox,
    thread: Option<JoinHandle<()>>,
    id: ThreadId,
    /// Number of disks whose first worker is here. The first worker alone serves a disk with only
    /// one queue.
    firsts: AtomicUsize,
}

impl PoolThread {
    pub(crate) fn new(Started { outbox, thread, id }: Started) -> PoolThread {
        PoolThread {
            outbox,
            thread: Some(thread),
            id,
            firsts: AtomicUsize::new(0),
        }
    }

    pub(crate) fn id(&self) -> ThreadId {
        self.id
    }

    pub(crate) fn firsts(&self) -> usize {
        self.firsts.load(SeqCst)
    }
}

impl Drop for PoolThread {
    fn drop(&mut self) {
        self.outbox.send_message(Message::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A worker's place on a pool's thread. The thread runs while any seat exists.
pub(crate) struct Seat {
    thread: Arc<PoolThread>,
    is_first: bool,
}

impl Seat {
    pub(crate) fn new(thread: &Arc<PoolThread>, is_first: bool) -> Seat {
        thread.firsts.fetch_add(usize::from(is_first), SeqCst);
        Seat {
            thread: thread.clone(),
            is_first,
        }
    }

    pub(crate) fn thread_id(&self) -> ThreadId {
        self.thread.id()
    }

    pub(crate) fn outbox(&self) -> Outbox {
        self.thread.outbox.clone()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.thread
            .firsts
            .fetch_sub(usize::from(self.is_first), SeqCst);
    }
}
