//! The way requests go: what the load loop needs of a virtqueue, a
//! connection or a file.

use crate::error::Result;
use crate::memory::Buffer;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl Op {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

    /// The word for people and for JSON.
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

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub slot: u16,
    /// 0 is success; else [`Port::describe_status`] knows.
    pub status: i32,
}

/// Events counted since the port was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Times the other side was told of new requests: eventfd writes, or
    /// system calls on a file, or sends on a connection.
    pub kicks: u64,
    /// Times the other side told us, or receives on a connection.
    pub calls: u64,
}

/// One queue of requests with `depth` slots, used by one thread.
pub trait Port: Send {
    /// The slot's data. The caller leaves it alone while the slot is in flight.
    fn buffer(&self, slot: u16) -> Buffer;

    /// Prepares a request in a free slot. `offset` is in bytes.
    fn queue(&mut self, slot: u16, op: Op, offset: u64);

    /// Starts all that was queued.
    fn submit(&mut self) -> Result<()>;

    /// Likewise, where [`Port::submit`] leaves it for [`Port::wait`].
    fn submit_now(&mut self) -> Result<()> {
        self.submit()
    }

    /// Takes what has ended; at most as many as are in flight.
    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()>;

    /// Returns when something may have ended, or after a while.
    fn wait(&mut self) -> Result<()>;

    /// The events so far.
    fn counters(&mut self) -> Counters;

    /// In words, for an error.
    fn describe_status(&self, status: i32) -> String;

    /// How often the port wants to be idle for [`Port::at_rest`]: after this
    /// many requests; `None`: never.
    fn rest_every(&self) -> Option<u32> {
        None
    }

    /// Nothing is in flight: the moment for checks.
    fn at_rest(&mut self) -> Result<()> {
        Ok(())
    }

    /// Pages found marked in the dirty log so far.
    fn log_pages(&self) -> u64 {
        0
    }
}
