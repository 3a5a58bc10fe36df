//! Reports of a server about its disks: their state, jobs, events and metrics.
//!
//! - `info` is the state of a disk, `jobs` the list of jobs, and `events` reports events;
//! - `counts` are the counters of a disk, and `measured` its state at one moment, as the process
//!   that serves it reports it. `sent` checks reports of other processes, and `untrusted` makes
//!   their texts safe to show;
//! - `families` has an entry for each metric of disks, `process` those of processes, and `guest`
//!   identifies the virtual machine of a disk;
//! - `scale` converts latencies to buckets that all disks share;
//! - `form` is the format of a page of metrics, and `samples` writes families. `exposition` makes
//!   a page of them, in `pieces`, and `exemplars` adds slow requests;
//! - `live` reports intervals to listeners, and `alarm` watches disks;
//! - `repeats` limits repeated log lines.
//!
//! No request is counted for metrics alone: `measured` reads atomics that workers update anyway.
//! Each atomic has a single writer.

mod alarm;
mod counts;
mod events;
mod exemplars;
mod exposition;
mod families;
mod form;
mod guest;
mod guests;
mod info;
mod job_id;
mod jobs;
mod live;
mod measured;
mod pieces;
mod process;
mod repeats;
mod samples;
mod scale;
mod sent;
mod untrusted;
mod worker_info;

pub use alarm::{AlarmInfo, Seen, Watches};
pub use counts::DiskCounts;
pub use events::{By, Events, Happened, Line};
pub use exposition::{Page, expose};
pub use form::Form;
pub use guests::GUESTS;
pub use info::{
    BackupInfo, BitmapInfo, Bitmaps, ConnectionInfo, FrontEnd, FuseInfo, ImageInfo, ImageProblem,
    Info, MirrorInfo, NbdInfo, PullInfo, SnapshotInfo, Snapshots, StartingJob, StreamInfo,
    TenantLimits,
};
pub use job_id::{JobId, JobKind};
pub use jobs::{JobInfo, JobState, Jobs, unknown_job};
pub use live::{
    BUCKETS_PER_DOUBLING, DiskSample, Figures, FrontEndSample, Full, Limiter, LimiterKind,
    Listener, Listeners, OpSample, QueueSample, Sample, WorkerSample, bucket_ns,
};
pub use measured::{Measured, ProcessInfo, QueueInfo, Visits};
pub use repeats::Repeats;
pub use scale::Scale;
pub use sent::{Measures, Sent};
pub use untrusted::{clean, clean_text, one_line};
pub use worker_info::WorkerInfo;
