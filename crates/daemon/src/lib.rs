//! From options to a running stack: the disks of one daemon with their workers,
//! exports and traces, its NBD server and its API.

mod access;
mod alarm;
mod allowance;
mod api;
mod cage;
mod command;
mod controller;
mod daemon;
mod error;
mod events;
mod files;
mod handover;
mod host;
mod identity;
mod info;
mod jobs;
mod limits;
mod link;
mod live;
mod mailbox;
mod metrics;
mod objects;
mod options;
mod orders;
mod pull_terms;
mod repeats;
mod reply;
mod request;
mod runtime;
mod signals;
mod socket;
mod stderr;
mod stop_timeout;
mod supervisor;
mod tenancy;
mod tenant;
mod untrusted;
mod users;

pub use access::{access, groups};
pub use alarm::AlarmInfo;
pub use daemon::{Daemon, Ended};
pub use error::Error;
pub use events::Events;
pub use fathom_sandbox::Mode as SandboxMode;
pub use files::read_config;
pub use handover::{TAKE_OVER, start_successors};
pub use identity::new_identity;
pub use info::{
    BackupInfo, BitmapInfo, Bitmaps, ConnectionInfo, FrontEnd, Info, MirrorInfo, NbdInfo,
    SnapshotInfo, Snapshots, StreamInfo, TenantLimits, WorkerInfo,
};
pub use jobs::{JobInfo, JobState, Jobs};
pub use limits::survive_size_limit;
pub use live::{
    BUCKETS_PER_DOUBLING, DiskSample, Figures, FrontEndSample, Limiter, LimiterKind, OpSample,
    QueueSample, Sample, WorkerSample, bucket_ns,
};
pub use objects::Outcome;
pub use options::{
    ApiOptions, DiskOptions, ExportOptions, NbdOptions, RemoteOptions, ServeOptions, TlsOptions,
};
pub use orders::{
    Advance, BackupOrder, CommitOrder, Completion, Merged, MirrorOrder, NewBitmap, NewName,
    SnapshotOrder, StreamOrder,
};
pub use repeats::Repeats;
pub use reply::ThrottleGroup;
pub use stderr::Stderr;
pub use stop_timeout::StopTimeout;
pub use tenancy::Tenancy;
pub use tenant::{NewTenant, begin_tenant, serve_tenant};
