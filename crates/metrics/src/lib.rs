//! What a server knows of its disks: their state, their jobs, what happens to them, and what is counted.
//!
//! - `info` is the state of a disk, `jobs` the list of jobs, `events` what happens;
//! - `counts` is what is counted of a disk, `measured` what is known of one at a moment, as the process that has the
//!   disk tells it; `sent` checks what another process has sent, and `untrusted` makes its texts safe to show;
//! - `families` has one line for each metric, `process` those of processes, `guest` says which virtual machine uses a disk;
//! - `scale` puts latencies into the buckets that all disks have in common;
//! - `form` is the format of a page of metrics, `samples` how families are written, `exposition` makes a page of them,
//!   in `pieces`, and `exemplars` adds slow requests;
//! - `live` tells intervals to whoever looks, and `alarm` watches disks;
//! - `repeats` counts log lines that are repeated.
//!
//! No request is counted for metrics alone: `measured` reads atomics that workers write anyway, each of which has one
//! writer.

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

pub use alarm::{AlarmInfo, Seen, Watches};
pub use counts::DiskCounts;
pub use events::{By, Events, Happened, Line};
pub use exposition::{Page, expose};
pub use form::Form;
pub use guests::GUESTS;
pub use info::{
    BackupInfo, BitmapInfo, Bitmaps, ConnectionInfo, FrontEnd, ImageInfo, ImageProblem, Info,
    MirrorInfo, NbdInfo, PullInfo, SnapshotInfo, Snapshots, StartingJob, StreamInfo, TenantLimits,
    WorkerInfo,
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
