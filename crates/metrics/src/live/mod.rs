//! Live numbers of disks, interval by interval.
//!
//! - `sample` is the report of an interval, a line of `/v1/live`;
//! - `counted` are a disk's counters at a moment, which can be subtracted;
//! - `spread` has the latencies of an interval: quantiles, and the buckets of a heat map;
//! - `disk` computes an interval from two moments of a disk, and `sampler` those of all disks;
//! - `limited` says in a line what limits a disk, by the rules of `fathom-limiter`;
//! - `listeners` are the clients: without any, nothing is measured.

mod counted;
mod disk;
mod limited;
mod listeners;
mod sample;
mod sampler;
mod spread;

pub use listeners::{Full, Listener, Listeners};
pub use sample::{
    DiskSample, Figures, FrontEndSample, Limiter, LimiterKind, OpSample, QueueSample, Sample,
    WorkerSample,
};
pub use spread::{BUCKETS_PER_DOUBLING, bucket_ns};
