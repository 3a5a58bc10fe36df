//! The report of an interval.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Live numbers of all disks of a server in one interval: one line of `/v1/live`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// End of the interval, in milliseconds since 1970.
    pub time_ms: u64,
    /// Length of the interval in seconds.
    pub seconds: f64,
    /// Number of the interval, which increases by one with each interval. A client that reads too
    /// slowly misses intervals.
    pub number: u64,
    /// Version of the server.
    pub version: String,
    /// Process ID of the server.
    pub pid: u32,
    /// CPU time of all processes of the server, in percent of one CPU.
    pub cpu_percent: f64,
    /// Resident memory of all processes of the server in bytes, including memory of guests that the
    /// processes have accessed.
    pub memory: u64,
    /// Numbers of each disk, by name.
    pub disks: Vec<DiskSample>,
}

/// Live numbers of a disk in one interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskSample {
    /// Name of the disk.
    pub name: String,
    /// Location of the image: a path or a URI, without passwords.
    pub image: String,
    /// Format of the image.
    pub format: String,
    /// I/O engine, such as `io_uring`.
    pub engine: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Guests and clients can only read.
    pub read_only: bool,
    /// The disk is frozen: requests wait until it is thawed.
    pub frozen: bool,
    /// Name of the pool whose threads serve the disk. Null if the disk has threads of its own.
    pub pool: Option<String>,
    /// Process ID of the process that serves the disk.
    pub pid: u32,
    /// Filters of the disk in the syntax of the command line, from the one closest to the guest to
    /// the one closest to the image.
    pub filters: Vec<String>,
    /// The virtual machine that uses the disk. Null if no virtual machine is connected.
    pub front_end: Option<FrontEndSample>,
    /// Number of connections of NBD clients to the disk.
    pub nbd_clients: u64,
    /// Number of times that programs have the disk's file open.
    #[serde(default)]
    pub fuse_opens: u64,
    /// Time that the numbers below cover, in seconds. For a disk that was added during the
    /// interval, this time is shorter than the interval.
    pub seconds: f64,
    /// The disk was removed and added again since the last interval: the numbers cover the time
    /// since it was added.
    pub restarted: bool,
    /// Numbers of all operations together.
    pub all: Figures,
    /// Numbers of each operation that occurred in the interval.
    pub operations: Vec<OpSample>,
    /// Number of requests that violated their protocol or that the disk does not support. No other
    /// number includes them.
    pub refused: u64,
    /// Number of requests in flight at the end of the interval.
    pub in_flight: u64,
    /// Mean number of requests in flight: the sum of the requests' durations, divided by `seconds`.
    pub mean_in_flight: f64,
    /// CPU time of the disk's workers, in percent of one CPU. Null if the threads belong to a pool.
    pub cpu_percent: Option<f64>,
    /// CPU time of the pool's busiest thread for all disks of the pool, in percent of one CPU. Null
    /// if the disk has threads of its own.
    pub pool_cpu_percent: Option<f64>,
    /// Share of the time in which a worker polled instead of sleeping, in percent: the mean of all
    /// workers.
    pub polling_percent: f64,
    /// Numbers of each worker.
    pub workers: Vec<WorkerSample>,
    /// Numbers of each virtqueue that is running.
    pub queues: Vec<QueueSample>,
    /// The suspected limiter: what limits the disk's speed.
    pub limiter: Limiter,
    /// Durations of requests: `[bucket, number of requests]` for each bucket that is not empty.
    /// Bucket n is the range from 2^(n/4) to 2^((n+1)/4) nanoseconds.
    #[schema(value_type = Vec<Vec<i64>>)]
    pub histogram: Vec<(u32, u64)>,
}

impl DiskSample {
    /// Returns the figures of one operation, or `None` if it has not occurred.
    pub fn op(&self, name: &str) -> Option<&Figures> {
        let found = self.operations.iter().find(|one| one.op == name);
        found.map(|one| &one.figures)
    }
}

/// Numbers of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpSample {
    /// Name of the operation, such as `read`.
    pub op: String,
    /// Numbers of the operation's requests, as fields of this object.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Numbers of requests that completed in an interval. A time is null if the interval has too few
/// requests for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    /// Number of requests.
    pub requests: u64,
    /// Number of bytes read, written, discarded or zeroed by requests that succeeded.
    pub bytes: u64,
    /// Number of requests that failed.
    pub errors: u64,
    /// Requests per second.
    pub iops: f64,
    /// `bytes` per second.
    pub bytes_per_second: f64,
    /// `errors` per second.
    pub errors_per_second: f64,
    /// Mean duration of a request in microseconds.
    pub mean_us: Option<f64>,
    /// Median of the durations in microseconds.
    pub p50_us: Option<f64>,
    /// 99th percentile of the durations in microseconds.
    pub p99_us: Option<f64>,
    /// Maximum of the durations in microseconds: the exact value if no earlier request took as
    /// long, otherwise an upper bound.
    pub max_us: Option<f64>,
    /// Mean time of a request in each stage in microseconds: `wake`, `queue`, `map`, `device`,
    /// `finish` and `notify`. Empty without requests.
    pub stages_us: BTreeMap<String, f64>,
}

/// A virtual machine, as the command line of its process describes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FrontEndSample {
    /// Process ID of the VMM. 0 if the process is in a PID namespace that is not visible to the
    /// server.
    pub pid: i32,
    /// Name of the VMM's program, such as `qemu-system-x86_64`. Null if unknown.
    pub vmm: Option<String>,
    /// Name of the guest (QEMU's option `-name`, Firecracker's option `--id`). Null if unknown.
    pub guest: Option<String>,
    /// UUID of the guest (QEMU's option `-uuid`). Null if unknown.
    pub uuid: Option<String>,
}

/// Kind of the suspected limiter, for programs:
///
/// - `idle`: the disk had no requests.
/// - `frozen`: the disk is frozen.
/// - `stuck`: requests are in flight, and none has completed.
/// - `filter`: a filter holds requests back.
/// - `thread`: a thread has work all the time.
/// - `tables`: lookups in the image's tables take most of the time.
/// - `client`: the client keeps few requests in flight.
/// - `latency`: requests take their time one after the other, and nothing is busy.
/// - `unknown`: no rule holds, or the evidence that a rule needs was not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimiterKind {
    /// The disk had no requests.
    Idle,
    /// The disk is frozen.
    Frozen,
    /// Requests are in flight, and none has completed.
    Stuck,
    /// A filter holds requests back.
    Filter,
    /// A thread has work all the time.
    Thread,
    /// Lookups in the image's tables take most of the time.
    Tables,
    /// The client keeps few requests in flight.
    Client,
    /// Requests take their time one after the other, and nothing is busy.
    Latency,
    /// No rule holds, or the evidence that a rule needs was not seen.
    Unknown,
}

/// The suspected limiter of a disk in an interval: a hint, which rules derive from the interval's
/// numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limiter {
    /// Kind of the limiter, for programs.
    pub kind: LimiterKind,
    /// Description of the limiter for display, in one line.
    pub text: String,
}

/// Live numbers of a worker in one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerSample {
    /// Completed requests per second.
    pub requests_per_second: f64,
    /// CPU time of the worker's thread, in percent of one CPU. Null if the thread belongs to a
    /// pool.
    pub cpu_percent: Option<f64>,
    /// Share of the time in which the worker polled instead of sleeping, in percent.
    pub polling_percent: f64,
    /// Notifications from guests per second.
    pub kicks_per_second: f64,
    /// Number of times per second that the worker went to sleep because it had no work.
    pub sleeps_per_second: f64,
    /// Interrupts sent to guests per second.
    pub interrupts_per_second: f64,
}

/// Live numbers of a virtqueue in one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueueSample {
    /// Index of the virtqueue.
    pub queue: u16,
    /// Size of the virtqueue: the maximum number of requests in flight.
    pub size: u64,
    /// Number of requests in flight at the end of the interval.
    pub in_flight: u64,
    /// Requests taken from the virtqueue per second.
    pub requests_per_second: f64,
    /// Notifications from the guest per second.
    pub kicks_per_second: f64,
    /// Interrupts sent to the guest per second.
    pub interrupts_per_second: f64,
}
