//! How an interval is told.

use super::limiter::Limiter;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What all disks of a server have done in one interval: one line of `/v1/live`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Its end, in milliseconds since 1970.
    pub time_ms: u64,
    /// How long it was.
    pub seconds: f64,
    /// One more than that of the interval before: who does not read in time misses some.
    pub number: u64,
    pub version: String,
    /// The server.
    pub pid: u32,
    /// What all of its processes have used of CPUs: 100 is one of them.
    pub cpu_percent: f64,
    /// Bytes that they have in memory, guests' memory that they have touched included.
    pub memory: u64,
    /// By name.
    pub disks: Vec<DiskSample>,
}

/// What one disk has done in an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskSample {
    pub name: String,
    pub image: String,
    pub format: String,
    pub engine: String,
    /// Bytes.
    pub size: u64,
    pub read_only: bool,
    /// It stands still, and who uses it waits.
    pub frozen: bool,
    /// Whose threads serve it; null: its own.
    pub pool: Option<String>,
    /// The process that has it.
    pub pid: u32,
    /// As on the command line, in the order in which requests meet them.
    pub filters: Vec<String>,
    /// The virtual machine that uses it; null: none.
    pub front_end: Option<FrontEndSample>,
    pub nbd_clients: u64,
    /// The time that the figures below are of: shorter than the interval where the disk has come meanwhile.
    pub seconds: f64,
    /// It has gone and come back meanwhile: the figures are of the time since.
    pub restarted: bool,
    /// All requests together.
    pub all: Figures,
    /// Each operation that has occurred in the interval.
    pub operations: Vec<OpSample>,
    /// Requests that broke a rule of their protocol; they are in no other figure.
    pub refused: u64,
    /// At its end.
    pub in_flight: u64,
    /// On average, as follows from how many there were and how long they took.
    pub mean_in_flight: f64,
    /// What its workers have used of CPUs; null: its threads are a pool's.
    pub cpu_percent: Option<f64>,
    /// What the busiest thread of its pool has used of a CPU, for all disks of the pool.
    pub pool_cpu_percent: Option<f64>,
    /// Of the time, how much its workers looked for work instead of sleeping; mean of them.
    pub polling_percent: f64,
    pub workers: Vec<WorkerSample>,
    /// Virtqueues that run.
    pub queues: Vec<QueueSample>,
    /// What holds the disk back.
    pub limiter: Limiter,
    /// How long requests took: `[bucket, how many]` for each that is not empty. Bucket n is from
    /// 2^(n/4) to 2^((n+1)/4) ns.
    #[schema(value_type = Vec<Vec<i64>>)]
    pub histogram: Vec<(u32, u64)>,
}

impl DiskSample {
    /// Of one operation; None: it has not occurred.
    pub fn op(&self, name: &str) -> Option<&Figures> {
        let found = self.operations.iter().find(|one| one.op == name);
        found.map(|one| &one.figures)
    }
}

/// One operation's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpSample {
    pub op: String,
    #[serde(flatten)]
    pub figures: Figures,
}

/// Of some requests that were answered in an interval. A time is null where there are too few of them
/// for it to mean anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    pub requests: u64,
    /// What those were about that were answered without an error.
    pub bytes: u64,
    /// How many were answered with an error.
    pub errors: u64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub errors_per_second: f64,
    /// Microseconds, like the others.
    pub mean_us: Option<f64>,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    /// Where no request has ever taken longer: exactly; else what it was not longer than.
    pub max_us: Option<f64>,
    /// How much of the mean a request was in each stage: wake, queue, map, device, finish, notify.
    pub stages_us: BTreeMap<String, f64>,
}

/// A virtual machine, as its process shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FrontEndSample {
    /// 0: it cannot be seen from here.
    pub pid: i32,
    /// The program.
    pub vmm: Option<String>,
    /// Its name for the program.
    pub guest: Option<String>,
    pub uuid: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerSample {
    pub requests_per_second: f64,
    /// Of one CPU; null: its thread is a pool's.
    pub cpu_percent: Option<f64>,
    /// Of the time, how much it looked for work instead of sleeping.
    pub polling_percent: f64,
    /// How often it was woken by guests, and went to sleep.
    pub kicks_per_second: f64,
    pub sleeps_per_second: f64,
    pub interrupts_per_second: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueueSample {
    pub queue: u16,
    /// Requests that can be in flight.
    pub size: u64,
    pub in_flight: u64,
    pub requests_per_second: f64,
    pub kicks_per_second: f64,
    pub interrupts_per_second: f64,
}
