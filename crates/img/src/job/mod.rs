//! Moving data between disks: each disk has a worker, as when it is served, whose only client is
//! the thread that does the job. Requests go to a worker with their memory and come back with it,
//! so that nobody else can use it meanwhile.

mod behind;
mod burst;
mod copy;
mod pool;
mod segment;
mod zero;

pub(crate) use behind::WriteBehind;
pub(crate) use burst::Burst;
pub use copy::{Copy, CopyOptions};
pub(crate) use pool::Pool;
pub use segment::{Segment, Segments, State};
pub(crate) use zero::run_of;

/// How many writes of `unit` bytes, each of which is compressed by itself, are to be under way: they
/// keep all cores busy, and those that become tiny fill a block of the file together.
pub(crate) fn compressed_at_once(unit: u64) -> usize {
    const BYTES: u64 = 16 << 20;
    (BYTES / unit).clamp(16, 256) as usize
}
