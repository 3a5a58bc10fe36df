//! The trace ring: one fixed-size record a request, in a file that another
//! process can map and read while it is written.
//!
//! Layout, little-endian (native on every machine that has a TSC):
//! a header page, then for each worker's ring its records. A ring has one
//! writer and never waits for readers: a reader that is too slow loses the
//! oldest records, and knows how many.

use crate::stage::{Op, Stage};

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// The clock when each stage was entered, then when the last was left.
    pub stamps: [u64; Stage::COUNT + 1],
    /// Bytes from the start of the disk.
    pub offset: u64,
    pub len: u64,
    pub queue: u16,
    pub op: Op,
    /// 0 or the errno that it failed with.
    pub error: i32,
    /// Picked up by polling rather than by a kick.
    pub polled: bool,
}

/// The one writer of one ring.
pub struct RingWriter {}

impl RingWriter {
    /// Append a record, overwriting the oldest.
    #[inline]
    pub fn write(&mut self, _record: &TraceRecord) {}
}
