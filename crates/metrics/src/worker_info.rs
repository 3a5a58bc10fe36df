//! The counters of a worker, as the API reports them.

use fathom_core::{Counter, WorkerHandle};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Counters of a worker. An upgrade of the server does not reset them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerInfo {
    /// Number of requests that the worker has completed.
    pub requests: u64,
    /// Number of interrupts that the worker has sent to guests.
    pub notifications: u64,
    /// Number of times that the worker went to sleep because it had no work.
    pub sleeps: u64,
    /// Time that the worker has polled, in nanoseconds.
    #[serde(default)]
    pub polled_ns: u64,
    /// Number of times that the worker polled instead of sleeping, and found work.
    #[serde(default)]
    pub polls_paid: u64,
    /// Number of times that the worker polled instead of sleeping, and found no work.
    #[serde(default)]
    pub polls_vain: u64,
    /// Number of notifications from guests to the worker.
    #[serde(default)]
    pub kicks: u64,
    /// Number of times that the worker took a batch of requests, by size of the batch: 1, 2, 3 to
    /// 4, 5 to 8 and so on. The last element counts all larger batches.
    #[serde(default)]
    pub batches: Vec<u64>,
    /// CPU time of the worker's thread, in nanoseconds. Null if the thread belongs to a pool.
    #[serde(default)]
    pub cpu_ns: Option<u64>,
}

impl WorkerInfo {
    /// Reads the counters of a worker. `is_alone`: no other worker shares the worker's thread.
    pub fn of(worker: &WorkerHandle, is_alone: bool) -> WorkerInfo {
        let counters = worker.counters();
        let cpu = worker.thread_id().cpu_time().filter(|_| is_alone);
        WorkerInfo {
            requests: counters.answered.get(),
            notifications: counters.notifications.get(),
            sleeps: counters.sleeps.get(),
            polled_ns: counters.polled_ns.get(),
            polls_paid: counters.polls_paid.get(),
            polls_vain: counters.polls_vain.get(),
            kicks: counters.kicks.get(),
            batches: counters.batches.iter().map(Counter::get).collect(),
            cpu_ns: cpu.map(|cpu| cpu.as_nanos() as u64),
        }
    }

    /// Adds the counters of an earlier worker.
    pub fn and(self, before: &WorkerInfo) -> WorkerInfo {
        let before_of = |size| before.batches.get(size).copied().unwrap_or(0);
        let batches = self.batches.iter().enumerate();
        let batches = batches.map(|(size, n)| n + before_of(size)).collect();
        WorkerInfo {
            requests: self.requests + before.requests,
            notifications: self.notifications + before.notifications,
            sleeps: self.sleeps + before.sleeps,
            polled_ns: self.polled_ns + before.polled_ns,
            polls_paid: self.polls_paid + before.polls_paid,
            polls_vain: self.polls_vain + before.polls_vain,
            kicks: self.kicks + before.kicks,
            batches,
            cpu_ns: { self.cpu_ns }.map(|own| own + before.cpu_ns.unwrap_or(0)),
        }
    }
}
