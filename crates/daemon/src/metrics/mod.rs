//! What is counted of disks, for Prometheus and whoever else reads its formats.
//!
//! - `measured` is what is known of a disk, as the process that has it tells it;
//! - `families` has one line for each metric, `process` those of processes;
//! - `sent` checks what another process has sent of a disk;
//! - `guest` is which virtual machine uses it;
//! - `scale` puts latencies into the buckets that all disks have in common;
//! - `form` is as what they are written, `samples` how families do that;
//! - `exposition` makes a page of it, as `pieces`, and `exemplars` puts slow requests into that.
//!
//! No request is counted for metrics alone: `measured` reads atomics that workers write anyway,
//! each of which has one writer.

mod exemplars;
mod exposition;
mod families;
mod form;
mod guest;
mod guests;
mod measured;
mod pieces;
mod process;
mod samples;
mod scale;
mod sent;

pub use exposition::{Page, expose};
pub use form::Form;
pub use guests::GUESTS;
pub use measured::{Measured, ProcessInfo, QueueInfo, Visits};
pub use scale::Scale;
pub use sent::{Measures, Sent};
