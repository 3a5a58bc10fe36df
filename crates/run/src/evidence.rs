//! Measurements around a cell's work, from which its limiter is determined. Evidence is stored
//! separately from the verdict, so that improved rules can judge an old run again.
//!
//! All values refer to the measured window. A value that could not be measured is `None` or an
//! empty list, never zero.

use serde::{Deserialize, Serialize};

use crate::Role;

/// The evidence of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evidence {
    /// Length of the window in seconds.
    pub seconds: f64,
    /// Load in the window, and its results.
    pub load: Load,
    /// CPUs of the machine that runs servers and guests.
    pub host: Option<Processors>,
    /// CPUs of the guest, as the guest reports them.
    pub guest: Option<Processors>,
    /// Threads on the host: those of QEMU, of the server, of the load if it runs on the host, and
    /// kernel threads that had work.
    pub threads: Vec<ThreadTime>,
    /// The control group that limits the server or QEMU, if there is one.
    pub cgroup: Option<Throttling>,
    /// The I/O limit of a control group that limits the server or QEMU, if there is one.
    pub io_limit: Option<IoLimit>,
    /// The host's pressure (PSI).
    pub pressure: Option<Pressure>,
    /// The block device below the image.
    pub device: Option<DeviceTime>,
    /// The same work on the bare device, in the same run.
    pub bare: Option<Bare>,
    /// Fathom's filters, in their order.
    pub filters: Vec<Held>,
    /// Parts of a request's time, outermost layer first, if measured; they add up to the latency.
    pub layers: Vec<Layer>,
    /// The locks with the longest waits.
    pub locks: Vec<LockWait>,
    /// Crossings between guest and host.
    pub crossings: Option<Crossings>,
    /// Instructions executed, if the CPUs count them.
    pub instructions: Option<Instructions>,
}

/// The load and its results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Number of threads that issue requests. If it is 0, and `depth` too, the load is known only
    /// from its disk, which counts all requests.
    pub threads: u32,
    /// Number of requests that each thread keeps in flight.
    pub depth: u32,
    /// Total number of requests; a request may be split or merged on its way to the device.
    pub requests: u64,
    /// Total number of transferred bytes.
    pub bytes: u64,
    /// Seconds for which the load ran, if its start took a part of the window; 0 means the whole
    /// window.
    pub seconds: f64,
    /// Mean time of a request.
    pub mean_ns: f64,
    /// Seconds of CPU time of each load thread, on the machine where it ran.
    pub thread_cpu: Vec<f64>,
    /// The load's threads poll for completions, so their CPU time does not show how busy they are.
    pub polls: bool,
}

/// A machine's CPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Processors {
    /// For each CPU, the percentage of the window in which it ran something. Waiting for I/O and
    /// stolen time do not count.
    pub busy: Vec<f64>,
    /// For each CPU, the percentage in which it was ready to run, but the hypervisor ran something
    /// else.
    pub steal: Vec<f64>,
}

/// Times of a thread in the window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadTime {
    /// Process id on the host.
    pub pid: u32,
    /// Thread id on the host.
    pub tid: u32,
    /// Thread's name in the kernel.
    pub name: String,
    /// Role of the thread, which the rules for limiters use.
    pub role: ThreadRole,
    /// Number of the vCPU.
    pub vcpu: Option<u32>,
    /// Seconds of CPU time.
    pub cpu: f64,
    /// Seconds of waiting for a CPU while ready to run (schedstat).
    pub waiting: Option<f64>,
    /// The thread polls for work, so its CPU time does not show how busy it is.
    pub polls: bool,
    /// Seconds of `cpu` in which the thread polled without finding work, if it reports that.
    pub polled: Option<f64>,
}

/// Role of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThreadRole {
    /// Thread that runs a virtual CPU.
    Vcpu,
    /// QEMU's main loop.
    Main,
    /// An I/O thread of QEMU, or a worker of a server.
    Io,
    /// A pool thread that makes blocking calls.
    Pool,
    /// The load generator on the host.
    Load,
    /// A thread of the host's kernel.
    Kernel,
    /// Thread of none of the other roles.
    #[default]
    Other,
}

/// Effect of a control group's CPU limit (cpu.stat).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Throttling {
    /// Path of the group.
    pub group: String,
    /// Number of enforcement periods of the limit in the window.
    pub periods: u64,
    /// Number of periods in which the group used up its quota.
    pub throttled: u64,
    /// Total time in seconds for which its threads were throttled.
    pub seconds: f64,
}

/// A control group's limit for the I/O on a block device, and its use in the window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IoLimit {
    /// Path of the group.
    pub group: String,
    /// Name of the device in `/sys/block`.
    pub device: String,
    /// Unit of the limit.
    pub kind: IoLimitKind,
    /// Bytes, or reads or writes, that the limit allows per second.
    pub allowed: f64,
    /// Number of bytes, or of reads or writes, of the group in the window.
    pub used: u64,
}

/// Unit of an I/O limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoLimitKind {
    /// Bytes read.
    ReadBytes,
    /// Bytes written.
    WriteBytes,
    /// Read requests.
    Reads,
    /// Write requests.
    Writes,
}

/// Percentage of the window in which some task waited for a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pressure {
    /// Percentage of waiting for a CPU.
    pub cpu: f64,
    /// Percentage of waiting for I/O.
    pub io: f64,
    /// Percentage of waiting for memory.
    pub memory: f64,
}

/// A block device in the window (/sys/block/NAME/stat).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceTime {
    /// Name of the device in `/sys/block`.
    pub name: String,
    /// Number of reads and writes that the device completed.
    pub requests: u64,
    /// Number of bytes that the device read and wrote.
    pub bytes: u64,
    /// Percentage of the window in which at least one request was in flight.
    pub utilisation: f64,
    /// Mean number of requests in flight.
    pub in_flight: f64,
    /// Mean time of a request in the device's queue and in the device.
    pub mean_ns: f64,
    /// Number of requests that the kernel allows in flight in each hardware queue (nr_requests),
    /// if it is known.
    pub queue: Option<u32>,
    /// Number of hardware queues. `None` in runs of earlier versions.
    pub queues: Option<u32>,
    /// Number of bytes that the watched processes (QEMU, the server, the load on the host) read
    /// and wrote, on all devices. `None` if that could not be read.
    pub own_bytes: Option<u64>,
}

/// Results of the same work on the bare device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bare {
    /// Number of requests completed per second.
    pub requests_per_second: f64,
    /// Number of bytes transferred per second.
    pub bytes_per_second: f64,
    /// Mean time of a request in nanoseconds.
    pub mean_ns: f64,
}

/// Delay by a filter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// Name of the filter.
    pub filter: String,
    /// Number of requests that the filter held.
    pub requests: u64,
    /// Mean delay over all requests of the cell.
    pub mean_ns: f64,
}

/// A layer's part of a request's mean time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Name of the layer, as in the breakdown of a request's time.
    pub name: String,
    /// Layer's part of the mean time in nanoseconds.
    pub mean_ns: f64,
}

/// Waiting for a lock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LockWait {
    /// Kind of the lock and the function that waits for it: `SPIN virtio_queue_rq [virtio_blk.ko]`.
    pub name: String,
    /// `guest` or `host`.
    pub side: String,
    /// Number of waits, summed over all threads.
    pub waits: u64,
    /// Seconds of waiting, summed over all threads.
    pub seconds: f64,
}

/// Numbers of events between guest and host in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Crossings {
    /// Number of times the guest's driver notified the device.
    pub kicks: Option<u64>,
    /// Number of the device's interrupts in the guest.
    pub interrupts: Option<u64>,
    /// VM exits of all kinds.
    pub exits: Option<u64>,
    /// System calls of the server.
    pub calls: Option<u64>,
}

/// Instructions executed in the window, in user space and kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Instructions {
    /// Instructions of the guest on its virtual CPUs; `None` for an emulated guest.
    pub guest: Option<u64>,
    /// Instructions of the process that serves the disk.
    pub server: Option<u64>,
}

impl Evidence {
    /// Returns the number of seconds for which the load ran.
    pub fn load_seconds(&self) -> f64 {
        match self.load.seconds > 0.0 {
            true => self.load.seconds,
            false => self.seconds,
        }
    }
}

impl From<Role> for ThreadRole {
    fn from(role: Role) -> ThreadRole {
        match role {
            Role::Vcpu => ThreadRole::Vcpu,
            Role::Main => ThreadRole::Main,
            Role::Io => ThreadRole::Io,
            Role::Pool => ThreadRole::Pool,
            Role::Other => ThreadRole::Other,
        }
    }
}
