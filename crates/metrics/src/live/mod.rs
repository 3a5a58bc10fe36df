//! What goes on right now, interval by interval, for whoever looks.
//!
//! - `sample` is how an interval is told, a line of `/v1/live`;
//! - `counted` is what there is to subtract: all that a disk has counted until a moment;
//! - `spread` has latencies of an interval: quantiles, and the buckets of a heat map;
//! - `disk` makes an interval of two moments of a disk, `sampler` of those of all disks;
//! - `limiter` says in a line what holds a disk back;
//! - `listeners` are those who look: while there are none, nothing is measured.

mod counted;
mod disk;
mod limiter;
mod listeners;
mod sample;
mod sampler;
mod spread;

pub use limiter::{Limiter, LimiterKind};
pub use listeners::{Full, Listener, Listeners};
pub use sample::{
    DiskSample, Figures, FrontEndSample, OpSample, QueueSample, Sample, WorkerSample,
};
pub use spread::{BUCKETS_PER_DOUBLING, bucket_ns};
