//! The interface between the load loop and a virtqueue, a connection or a file.

use crate::error::Result;
use crate::memory::Buffer;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Read of one block.
    Read,
    /// Write of one block.
    Write,
    /// Flush of the write cache, without data.
    Flush,
    /// Discard of one block.
    Discard,
    /// Request without data to write zeroes to one block.
    WriteZeroes,
}

impl Op {
    /// All operations, in the order of their discriminants.
    pub const ALL: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

    /// Returns the name for text and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write_zeroes",
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub slot: u16,
    /// 0 on success, or a value for [`Port::describe_status`].
    pub status: i32,
}

/// Number of notifications since the port was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Notifications to the server: eventfd writes, system calls on a file, or sends on a
    /// connection.
    pub kicks: u64,
    /// Notifications from the server: eventfd signals, or receives on a connection.
    pub calls: u64,
}

/// A queue of requests with a fixed number of slots, used by one thread.
pub trait Port: Send {
    /// Returns the slot's data buffer. The caller must not access it while the slot is in flight.
    fn buffer(&self, slot: u16) -> Buffer;

    /// Queues a request in a free slot. `offset` is in bytes.
    fn queue(&mut self, slot: u16, op: Op, offset: u64);

    /// Submits all queued requests, now or at the next [`Port::wait`].
    fn submit(&mut self) -> Result<()>;

    /// Submits all queued requests at once, even if [`Port::submit`] defers that to [`Port::wait`].
    fn submit_now(&mut self) -> Result<()> {
        self.submit()
    }

    /// Appends the completed requests to `done`. The number of completed requests is at most the
    /// number in flight.
    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()>;

    /// Waits until a request may have completed, or for a limited time.
    fn wait(&mut self) -> Result<()>;

    /// Returns the counters.
    fn counters(&mut self) -> Counters;

    /// Describes a non-zero status, for an error message.
    fn describe_status(&self, status: i32) -> String;

    /// Returns the number of requests after which the port must be idle for [`Port::at_rest`].
    /// `None`: never.
    fn rest_every(&self) -> Option<u32> {
        None
    }

    /// Performs checks that need an idle port. Called when no request is in flight.
    fn at_rest(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes the following reads of `len` bytes at `offset` come from the storage, if this client
    /// itself has a cache. Called when no request is in flight.
    fn drop_cache(&mut self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Returns the number of pages found marked in the dirty log so far.
    fn log_pages(&self) -> u64 {
        0
    }
}
