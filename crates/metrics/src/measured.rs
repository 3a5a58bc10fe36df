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
    pub info: Info,
    pub counts: DiskCounts,
    /// The running virtqueues, in order.
    pub queues: Vec<QueueInfo>,
    pub in_flight: u64,
    /// Number of connections of front-ends, and of NBD clients.
    pub front_ends: u64,
    pub clients: u64,
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
    pub queue: u16,
    /// Maximum number of requests in flight.
    pub size: u64,
    pub requests: u64,
    pub in_flight: u64,
    pub kicks: u64,
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
    pub pid: u32,
    /// Resident memory in bytes.
    pub resident: u64,
    pub cpu_ns: u64,
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

/// Number of connections to a disk.
#[derive(Debug, Default)]
pub struct Visits {
    front_ends: AtomicU64,
    clients: AtomicU64,
}

impl Visits {
    pub fn of_front_end(&self) {
        self.front_ends.fetch_add(1, Relaxed);
    }

    pub fn of_client(&self) {
        self.clients.fetch_add(1, Relaxed);
    }

    /// Returns the number of connections of front-ends, and of NBD clients.
    pub fn counts(&self) -> (u64, u64) {
        (self.front_ends.load(Relaxed), self.clients.load(Relaxed))
    }
}
