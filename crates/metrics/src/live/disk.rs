//! An interval of one disk, computed from two moments.

use super::counted::Counted;
use super::limited::{idle, limiter};
use super::sample::{DiskSample, FrontEndSample, OpSample, QueueSample, WorkerSample};
use super::spread::{figures, histogram, rate};
use crate::worker_info::WorkerInfo;
use crate::{Measured, QueueInfo};
use fathom_trace::Op;

/// The counters of a disk at a moment.
pub struct Moment {
    pub counted: Counted,
    pub workers: Vec<WorkerInfo>,
    pub queues: Vec<QueueInfo>,
    pub pool_threads: Vec<u64>,
}

impl Moment {
    pub fn of(measured: &mut Measured) -> Moment {
        Moment {
            counted: Counted::of(&measured.counts),
            workers: measured.info.workers.clone(),
            queues: std::mem::take(&mut measured.queues),
            pool_threads: std::mem::take(&mut measured.pool_threads),
        }
    }

    /// Returns a moment without any counts.
    fn empty() -> Moment {
        Moment {
            counted: Counted::default(),
            workers: Vec::new(),
            queues: Vec::new(),
            pool_threads: Vec::new(),
        }
    }
}

/// The interval that ended at `now`.
pub struct Between<'a> {
    pub measured: &'a Measured,
    /// The previous moment. `None`: the disk did not exist then.
    pub before: Option<&'a Moment>,
    pub now: &'a Moment,
    /// Length of the interval in seconds, unless the disk's own counters say it more exactly.
    pub seconds: f64,
    pub ns_per_tick: f64,
    pub front_end: Option<FrontEndSample>,
}

impl Between<'_> {
    pub fn sample(self) -> DiskSample {
        let since = self
            .before
            .map(|before| self.now.counted.since(&before.counted));
        let restarted = matches!(since, Some(None));
        let counted = since.flatten();
        let counted = counted.unwrap_or_else(|| self.now.counted.clone());
        let seconds = counted.seconds.filter(|s| *s > 0.0).unwrap_or(self.seconds);
        let empty = Moment::empty();
        let before = self.before.filter(|_| !restarted).unwrap_or(&empty);
        let all = counted.all();
        let info = &self.measured.info;
        let ops = Op::ALL.into_iter().zip(&counted.ops);
        let ops = ops.filter(|(_, op)| op.requests() > 0 || op.errors > 0);
        let operations = ops.map(|(op, counted)| OpSample {
            op: op.name().to_owned(),
            figures: figures(counted, seconds, self.ns_per_tick),
        });
        let workers = workers(&before.workers, &self.now.workers, seconds);
        let cpu = workers.iter().filter_map(|worker| worker.cpu_percent);
        let mut sample = DiskSample {
            name: info.name.clone(),
            image: info.disk.clone(),
            format: info.format.clone(),
            engine: info.engine.clone(),
            size: info.size,
            read_only: info.read_only,
            frozen: info.frozen,
            pool: info.pool.clone(),
            pid: self.measured.process.pid,
            filters: info.filters.iter().map(ToString::to_string).collect(),
            front_end: self.front_end,
            nbd_clients: info
                .nbd
                .as_ref()
                .map_or(0, |nbd| nbd.connections.len() as u64),
            fuse_opens: info.fuse.as_ref().map_or(0, |fuse| fuse.open),
            seconds,
            restarted,
            operations: operations.collect(),
            refused: counted.refused,
            in_flight: self.measured.in_flight,
            mean_in_flight: all.total as f64 * self.ns_per_tick / 1e9 / seconds.max(1e-9),
            cpu_percent: cpu.reduce(|a, b| a + b),
            pool_cpu_percent: busiest(&before.pool_threads, &self.now.pool_threads, seconds),
            polling_percent: mean(workers.iter().map(|worker| worker.polling_percent)),
            queues: queues(&before.queues, &self.now.queues, seconds),
            workers,
            limiter: idle(),
            histogram: histogram(&all, self.ns_per_tick),
            all: figures(&all, seconds, self.ns_per_tick),
        };
        sample.limiter = limiter(&sample);
        sample
    }
}

/// Returns the increase of a counter, or its value if it has started again.
fn more(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

/// Returns a time as a percentage of the interval.
fn percent(ns: u64, seconds: f64) -> f64 {
    (rate(ns, seconds) / 1e7).min(100.0)
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<f64>() / n
}

fn workers(before: &[WorkerInfo], now: &[WorkerInfo], seconds: f64) -> Vec<WorkerSample> {
    let none = WorkerInfo::default();
    let pairs = now.iter().enumerate();
    let pairs = pairs.map(|(index, now)| (before.get(index).unwrap_or(&none), now));
    let per_second = |now, before| rate(more(now, before), seconds);
    let sample = |(before, now): (&WorkerInfo, &WorkerInfo)| WorkerSample {
        requests_per_second: per_second(now.requests, before.requests),
        cpu_percent: now
            .cpu_ns
            .map(|ns| percent(more(ns, before.cpu_ns.unwrap_or(0)), seconds)),
        polling_percent: percent(more(now.polled_ns, before.polled_ns), seconds),
        kicks_per_second: per_second(now.kicks, before.kicks),
        sleeps_per_second: per_second(now.sleeps, before.sleeps),
        interrupts_per_second: per_second(now.notifications, before.notifications),
    };
    pairs.map(sample).collect()
}

fn queues(before: &[QueueInfo], now: &[QueueInfo], seconds: f64) -> Vec<QueueSample> {
    let of = |now: &QueueInfo| {
        let before = before.iter().find(|before| before.queue == now.queue);
        // A virtqueue that was stopped and started counts from zero.
        let before = before.filter(|before| before.requests <= now.requests);
        let per_second =
            |count: fn(&QueueInfo) -> u64| rate(more(count(now), before.map_or(0, count)), seconds);
        QueueSample {
            queue: now.queue,
            size: now.size,
            in_flight: now.in_flight,
            requests_per_second: per_second(|queue| queue.requests),
            kicks_per_second: per_second(|queue| queue.kicks),
            interrupts_per_second: per_second(|queue| queue.notifications),
        }
    };
    now.iter().map(of).collect()
}

/// Returns the usage of a pool's busiest thread, or `None` if there is no thread.
fn busiest(before: &[u64], now: &[u64], seconds: f64) -> Option<f64> {
    let pairs = now.iter().enumerate();
    let used = pairs.map(|(index, ns)| more(*ns, before.get(index).copied().unwrap_or(*ns)));
    used.max().map(|ns| percent(ns, seconds))
}
