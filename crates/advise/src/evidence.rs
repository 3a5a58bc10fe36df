//! The evidence about one disk and its host over a window.

use std::time::Duration;

/// The evidence about a disk. Shares are from 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// The verdict about the disk.
    pub verdict: Verdict,
    /// Size of the disk in bytes.
    pub size: u64,
    /// The storage of the image.
    pub storage: Storage,
    /// Mean duration of a request in microseconds; 0 without requests.
    pub mean_us: f64,
    /// Share of the requests' time in the stage `map`.
    pub map: f64,
    /// Share of the requests' time in the stage `device`.
    pub device: f64,
    /// Mean number of requests in flight.
    pub in_flight: f64,
    /// Share of reads among the requests.
    pub reads: f64,
    /// Share of sampled reads that lie behind the read before them. `None`: too few reads were
    /// sampled.
    pub forward: Option<f64>,
    /// The threads that serve the disk.
    pub threads: Threads,
    /// The tables of the image. `None`: the format has no tables.
    pub tables: Option<Tables>,
    /// The filters of the disk, from the one closest to the guest to the one closest to the image.
    pub filters: Vec<Filter>,
    /// The host of the server.
    pub host: Host,
}

/// The verdict about a disk: the rule that holds, or the state of a disk without a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
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

/// The storage of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A file or a block device.
    File,
    /// Another server: NBD or Ceph.
    Server,
    /// Memory, or no data at all.
    Memory,
}

/// The threads that serve a disk.
#[derive(Clone, Debug, PartialEq)]
pub enum Threads {
    /// The disk has threads of its own.
    Own(OwnThreads),
    /// The threads belong to a pool.
    Shared(SharedThreads),
}

/// Threads of one disk.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnThreads {
    /// Number of threads.
    pub count: u16,
    /// CPUs that the threads have used together: 1 is one CPU for the whole window.
    pub cpu: f64,
    /// Number of CPUs to which the threads are pinned. `None`: the threads are not pinned.
    pub pinned: Option<u16>,
    /// Number of virtqueues and connections with requests.
    pub sources: u16,
    /// How the threads poll.
    pub polling: Polling,
    /// Number of times that a thread went to sleep, for each request.
    pub sleeps: f64,
    /// How the threads do I/O.
    pub engine: Engine,
}

/// Threads of a pool, which serve several disks.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedThreads {
    /// Name of the pool.
    pub pool: String,
    /// Share of the requests of all disks of the pool that are those of other disks.
    pub others: f64,
    /// The disk of the pool with the most requests, if that is another disk.
    pub busiest: Option<String>,
    /// Other pools of the server that serve a disk.
    pub pools: Vec<Pool>,
}

/// A pool of threads.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// CPU share of the busiest thread.
    pub cpu: f64,
}

/// How a thread polls before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// While polling saves time, at most for a part of each second.
    Auto,
    /// Never.
    Off,
    /// For a fixed time.
    Fixed(Duration),
}

/// How a thread does I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The kernel's io_uring.
    IoUring,
    /// Linux AIO.
    Native,
    /// Threads that make blocking system calls.
    Threads,
}

/// The tables of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tables {
    /// Size limit of their cache in bytes.
    pub cache: u64,
    /// Number of reads of the tables, for each request.
    pub reads: f64,
}

/// A filter of a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    /// Name of the filter's kind.
    pub name: String,
    /// Options that differ from their defaults.
    pub options: Vec<(String, String)>,
    /// The filter with these options, as the command line has it.
    pub text: String,
    /// Share of the window in which the filter held requests back. `None`: the filter does not
    /// count it.
    pub held: Option<f64>,
}

/// The host of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    /// Number of CPUs that were idle: 1 is one CPU for the whole window.
    pub free_cpus: f64,
    /// Memory in bytes that programs can still take.
    pub free_memory: u64,
}

impl Host {
    /// Returns true if another thread would have a CPU of its own.
    pub fn has_free_cpu(&self) -> bool {
        self.free_cpus >= 1.0
    }
}
