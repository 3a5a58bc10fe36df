//! What was seen around a cell's work, from which its limiter is told. Evidence is kept apart from
//! the verdict, so that an old run can be judged again by better rules.
//!
//! All of it is of the measured window; what could not be seen is `None` or an empty list, never
//! zero.

use serde::{Deserialize, Serialize};

use crate::Role;

/// The evidence of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evidence {
    /// Length of the window.
    pub seconds: f64,
    pub load: Load,
    /// The machine that runs servers and guests.
    pub host: Option<Processors>,
    /// The guest, as it sees itself.
    pub guest: Option<Processors>,
    /// Of the host: QEMU's, the server's, the load's (where it runs on the host), and the kernel's
    /// that had something to do.
    pub threads: Vec<ThreadTime>,
    /// The control group that limits the server or QEMU, if one does.
    pub cgroup: Option<Throttling>,
    /// The host's pressure (PSI).
    pub pressure: Option<Pressure>,
    /// The block device below the image.
    pub device: Option<DeviceTime>,
    /// The same work on the bare device, in the same run.
    pub bare: Option<Bare>,
    /// Filters of Fathom's, in their order.
    pub filters: Vec<Held>,
    /// Where a request's time goes, outermost layer first, where that was measured: they add up to
    /// the latency.
    pub layers: Vec<Layer>,
    /// The locks that were waited for most.
    pub locks: Vec<LockWait>,
    /// Crossings between guest and host.
    pub crossings: Option<Crossings>,
    /// What the CPUs carried out, where they count it.
    pub instructions: Option<Instructions>,
}

/// The load and what it saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Threads that make requests.
    pub threads: u32,
    /// Requests that each keeps in flight.
    pub depth: u32,
    /// In all; a request may be split or merged on its way to the device.
    pub requests: u64,
    pub bytes: u64,
    /// For how long it ran, where its start took a part of the window; 0: for all of it.
    pub seconds: f64,
    /// A request's mean time.
    pub mean_ns: f64,
    /// Of each load thread, seconds on a CPU of the machine where it ran.
    pub thread_cpu: Vec<f64>,
    /// Its threads look for completions without sleeping: being on a CPU says nothing of them.
    pub polls: bool,
}

/// A machine's CPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Processors {
    /// Of each CPU: percent of the window in which it ran something; waiting for I/O is not, nor is
    /// what was stolen.
    pub busy: Vec<f64>,
    /// Of each CPU: percent in which it was ready to run and the hypervisor ran something else.
    pub steal: Vec<f64>,
}

/// A thread's share of the window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadTime {
    pub pid: u32,
    pub tid: u32,
    pub name: String,
    pub role: ThreadRole,
    /// A vCPU's number.
    pub vcpu: Option<u32>,
    /// Seconds on a CPU.
    pub cpu: f64,
    /// Seconds ready to run, waiting for a CPU (schedstat).
    pub waiting: Option<f64>,
    /// It looks for work without sleeping: being on a CPU does not say that it has work.
    pub polls: bool,
    /// Of `cpu`, the seconds in which it looked and found nothing, where it can tell.
    pub polled: Option<f64>,
}

/// What a thread is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThreadRole {
    Vcpu,
    /// QEMU's main loop.
    Main,
    /// An I/O thread of QEMU's, or a worker of a server.
    Io,
    /// A thread of a pool that makes blocking calls.
    Pool,
    /// The load generator on the host.
    Load,
    /// The host's kernel.
    Kernel,
    #[default]
    Other,
}

/// What a control group's CPU limit did (cpu.stat).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Throttling {
    /// Its path.
    pub group: String,
    pub periods: u64,
    /// Periods in which it had used up its share.
    pub throttled: u64,
    /// Seconds for which its threads were held, added up.
    pub seconds: f64,
}

/// Percent of the window in which some task waited for a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pressure {
    pub cpu: f64,
    pub io: f64,
    pub memory: f64,
}

/// A block device in the window (/sys/block/NAME/stat).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceTime {
    pub name: String,
    pub requests: u64,
    pub bytes: u64,
    /// Percent of the window in which something was in flight.
    pub utilisation: f64,
    /// Mean number in flight.
    pub in_flight: f64,
    /// A request's mean time in the device's queue and in the device.
    pub mean_ns: f64,
    /// Requests that the kernel allows in flight, if that is known.
    pub queue: Option<u32>,
}

/// The same work on the bare device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bare {
    pub requests_per_second: f64,
    pub bytes_per_second: f64,
    pub mean_ns: f64,
}

/// What a filter held back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The filter's name.
    pub filter: String,
    /// Requests that it held.
    pub requests: u64,
    /// For how long, on the mean of all of the cell's requests.
    pub mean_ns: f64,
}

/// A layer's share of a request's mean time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    pub name: String,
    pub mean_ns: f64,
}

/// Waiting for one lock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LockWait {
    pub name: String,
    /// `guest` or `host`.
    pub side: String,
    pub waits: u64,
    /// Seconds, of all threads together.
    pub seconds: f64,
}

/// Events between guest and host, in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Crossings {
    pub kicks: Option<u64>,
    pub interrupts: Option<u64>,
    /// VM exits of all kinds.
    pub exits: Option<u64>,
    /// System calls of the server.
    pub calls: Option<u64>,
}

/// Instructions in the window, of user space and kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Instructions {
    /// The guest's own, on its virtual CPUs; `None` for an emulated guest.
    pub guest: Option<u64>,
    /// Of who serves the disk.
    pub server: Option<u64>,
}

impl Evidence {
    /// For how long the load ran.
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
