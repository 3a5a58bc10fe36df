//! The measurements of a disk, as the process that serves it reports them.

use crate::counts::DiskCounts;
use crate::info::Info;
use fathom_core::{SourceCounters, ThreadId};
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The measurements of a disk at one moment.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// State of the disk.
    pub info: Info,
    /// Counters and histograms of the disk.
    pub counts: DiskCounts,
    /// The running virtqueues, in order.
    pub queues: Vec<QueueInfo>,
    /// Number of requests taken from queues and connections, and not yet answered.
    pub in_flight: u64,
    /// Number of times that a front-end has connected to the disk.
    pub front_ends: u64,
    /// Number of times that an NBD client has connected to the disk.
    pub clients: u64,
    /// Process that serves the disk.
    pub process: ProcessInfo,
    /// CPU time of each thread of the disk's pool in ns, for all disks of the pool.
    pub pool_threads: Vec<u64>,
}

#[cfg(test)]
use serde_json::Value;

#[cfg(test)]
impl Measured {
    /// Creates an unused disk with one worker and these counters.
    pub fn made(name: &str, worker: Value, counts: Value) -> Measured {
        let measured = serde_json::json!({
            "info": {
                "version": "", "pid": 1, "name": name, "disk": "/a", "format": "raw", "size": 1 << 20,
                "block_size": 512, "read_only": false, "engine": "io_uring", "max_queues": 1,
                "queues_running": 0, "filters": [], "workers": [worker], "uptime_seconds": 1
            },
            "counts": counts, "queues": [], "in_flight": 0, "front_ends": 0, "clients": 0,
            "process": { "pid": 1, "resident": 4096, "cpu_ns": 1, "threads": 1 }, "pool_threads": []
        });
        serde_json::from_value(measured).unwrap()
    }
}

/// The counters of a virtqueue.
#[derive(Debug, Serialize, Deserialize)]
pub struct QueueInfo {
    /// Number of the virtqueue on the disk.
    pub queue: u16,
    /// Maximum number of requests in flight.
    pub size: u64,
    /// Number of requests taken from the queue.
    pub requests: u64,
    /// Number of requests in flight at present.
    pub in_flight: u64,
    /// Number of kicks received from the guest.
    pub kicks: u64,
    /// Number of interrupts sent to the guest.
    pub notifications: u64,
}

impl QueueInfo {
    /// Returns the counters, or `None` if the source is an NBD connection.
    pub fn of(counters: &SourceCounters) -> Option<QueueInfo> {
        Some(QueueInfo {
            queue: counters.queue?,
            size: counters.capacity,
            requests: counters.taken.get(),
            in_flight: counters.in_flight.get(),
            kicks: counters.kicks.get(),
            notifications: counters.notifications.get(),
        })
    }
}

/// The process that serves the disk, and possibly other disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// Process ID.
    pub pid: u32,
    /// Resident memory in bytes.
    pub resident: u64,
    /// CPU time of all threads in nanoseconds, including threads that have ended.
    pub cpu_ns: u64,
    /// Number of threads.
    pub threads: u64,
}

impl ProcessInfo {
    /// Returns the metrics of this process.
    pub fn own() -> ProcessInfo {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        ProcessInfo {
            pid: std::process::id(),
            resident: value("VmRSS:") << 10,
            cpu_ns: ThreadId::process_cpu_time().as_nanos() as u64,
            threads: value("Threads:"),
        }
    }
}

/// Numbers of times that front-ends and NBD clients have connected to a disk.
#[derive(Debug, Default)]
pub struct Visits {
    front_ends: AtomicU64,
    clients: AtomicU64,
}

impl Visits {
    /// Counts a front-end that has connected.
    pub fn of_front_end(&self) {
        self.front_ends.fetch_add(1, Relaxed);
    }

    /// Counts an NBD client that has connected.
    pub fn of_client(&self) {
        self.clients.fetch_add(1, Relaxed);
    }

    /// Returns how often front-ends have connected, and how often NBD clients have.
    pub fn counts(&self) -> (u64, u64) {
        (self.front_ends.load(Relaxed), self.clients.load(Relaxed))
    }
}
