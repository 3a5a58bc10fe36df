//! Copies data between disks. Each disk has a worker, as when it is served; its only client is the
//! thread of the job. A request passes ownership of its buffer to the worker, and the reply returns
//! it, so nothing else can access the buffer meanwhile.

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

/// Returns how many compressed writes of `unit` bytes to keep in flight. The returned number keeps
/// all cores busy, and lets small compressed clusters fill a block of the file together.
pub(crate) fn compressed_at_once(unit: u64) -> usize {
    const BYTES: u64 = 16 << 20;
    (BYTES / unit).clamp(16, 256) as usize
}
