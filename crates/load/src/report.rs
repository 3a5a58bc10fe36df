//! Report of a run, as text and as JSON.

use std::fmt;

use fathom_trace::Bucket;
use fathom_trace::histogram::{Counts, FINE, is_known};
use serde::{Deserialize, Serialize};

use crate::load::Measured;
use crate::options::{Load, Options, Target, Wait};
use crate::port::Op;
use crate::verify::Verified;

/// Raw measurements of all workers.
#[derive(Debug)]
pub struct Outcome {
    /// Measurements of each worker.
    pub measured: Vec<Measured>,
    /// Length of a clock tick in ns.
    pub ns_per_tick: f64,
    /// CPU time of the serving process in the measured window, in ns; `None` if it is not known.
    pub backend_cpu_ns: Option<u64>,
}

/// Results of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// Name of the operation ([`Op::name`]).
    pub op: String,
    /// Number of requests that completed in the measured window.
    pub ios: u64,
    /// Number of requests per second.
    pub iops: f64,
    /// Throughput in 10^6 bytes per second; 0 for a flush.
    pub mb_per_s: f64,
    /// Latencies of these requests, and of those that were in flight when the window ended.
    pub latency: Latency,
    /// Number of requests per latency bucket in nanoseconds, without empty buckets. For merging
    /// reports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<Bucket>,
}

/// Latencies in nanoseconds. Mean and maximum are zero if there were no requests. A percentile is
/// `None` if fewer than ten requests took longer, or if it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: Option<f64>,
    /// 90th percentile.
    pub p90_ns: Option<f64>,
    /// 99th percentile.
    pub p99_ns: Option<f64>,
    /// 99.9th percentile.
    pub p999_ns: Option<f64>,
    /// Longest latency.
    pub max_ns: f64,
}

impl Latency {
    /// Names of the [`columns`](Self::columns).
    pub const COLUMNS: [&str; 6] = ["mean", "p50", "p90", "p99", "p99.9", "max"];

    /// Computes the statistics of latencies in ticks.
    pub fn of(ticks: &Counts<FINE>, ns_per_tick: f64) -> Latency {
        let quantile = |q| ticks.quantile(q).map(|ticks| ticks * ns_per_tick);
        Latency {
            mean_ns: ticks.mean().unwrap_or(0.0) * ns_per_tick,
            p50_ns: quantile(0.50),
            p90_ns: quantile(0.90),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: ticks.max() as f64 * ns_per_tick,
        }
        .known(ticks.count())
    }

    /// Removes the percentiles that are chance, because fewer than ten of `count` requests took
    /// longer.
    #[must_use]
    pub fn known(self, count: u64) -> Latency {
        let only = |q, ns: Option<f64>| ns.filter(|_| is_known(q, count));
        Latency {
            p50_ns: only(0.50, self.p50_ns),
            p90_ns: only(0.90, self.p90_ns),
            p99_ns: only(0.99, self.p99_ns),
            p999_ns: only(0.999, self.p999_ns),
            ..self
        }
    }

    /// Returns the columns of a table, in nanoseconds.
    pub fn columns(&self) -> [Option<f64>; 6] {
        [
            Some(self.mean_ns),
            self.p50_ns,
            self.p90_ns,
            self.p99_ns,
            self.p999_ns,
            Some(self.max_ns),
        ]
    }

    /// Writes the [`COLUMNS`](Self::COLUMNS) of a table's first line, and ends the line.
    pub(crate) fn write_head(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for name in Latency::COLUMNS {
            write!(f, " {name:>10}")?;
        }
        writeln!(f)
    }

    /// Writes the columns in microseconds, with `-` for an unknown percentile, and ends the line.
    pub(crate) fn write_columns(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ns in self.columns() {
            match ns {
                Some(ns) => write!(f, " {:>10.2}", ns / 1e3)?,
                None => write!(f, " {:>10}", "-")?,
            }
        }
        writeln!(f)
    }
}

/// CPU usage of the server process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Backend {
    /// Id of the server process.
    pub pid: u32,
    /// CPU time per request in microseconds.
    pub cpu_us_per_request: f64,
    /// CPU usage in percent of one CPU.
    pub cpu_percent: f64,
}

/// Report of a whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Path of the socket or file, or URI of the export.
    pub target: String,
    /// `vhost-user`, `nbd`, `io_uring`, `libaio` or `psync`.
    pub engine: String,
    /// Name of the mode, as for fio's `rw` ([`Rw::name`](crate::Rw::name)).
    pub rw: String,
    /// Size of a request in bytes.
    pub bs: u32,
    /// Number of requests in flight per queue.
    pub iodepth: u16,
    /// Number of virtqueues, connections or workers on a file.
    pub queues: u16,
    /// How the workers waited for completions: `interrupt` or `poll`.
    pub wait: String,
    /// Measured time in seconds.
    pub runtime: f64,
    /// Number of requests per second, over all operations.
    pub iops: f64,
    /// Throughput of all operations in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Results by operation, without operations of which no request completed.
    pub operations: Vec<Direction>,
    /// Number of requests that were in flight when the measured window ended. The latencies in
    /// `operations` include these requests, unless they failed. The counts `ios` do not, because
    /// these requests completed later.
    #[serde(default)]
    pub in_flight_at_end: u64,
    /// Time in nanoseconds for which the oldest of these requests had been in flight when the
    /// window ended. `None` without such requests.
    #[serde(default)]
    pub oldest_in_flight_ns: Option<f64>,
    /// CPU time of the workers per request in microseconds.
    pub client_cpu_us_per_request: f64,
    /// CPU usage of the server; `None` for a file, or if it is not known.
    pub backend: Option<Backend>,
    /// Mean number of notifications to the server per request.
    pub kicks_per_request: f64,
    /// Mean number of notifications from the server per request.
    pub calls_per_request: f64,
    /// Number of failed requests, which [`Load::continue_on_error`] permits.
    pub errors: u64,
    /// Number of times the load reconnected to the server after it had died.
    pub reconnects: u32,
    /// Numbers of verified blocks; `None` without verification.
    pub verify: Option<Verified>,
    /// Number of pages found marked in the dirty log. `None` if the dirty log was disabled.
    pub dirty_log_pages: Option<u64>,
}

impl Report {
    /// Combines the measurements of all workers.
    pub fn new(options: &Options, outcome: &Outcome, backend_pid: Option<u32>) -> Report {
        let load = &options.load;
        let workers = &outcome.measured;
        let longest = workers.iter().map(|m| m.window).max().unwrap_or(0);
        let seconds = outcome.ns_per_tick * longest as f64 / 1e9;
        let operations = directions(load, workers, outcome.ns_per_tick, seconds);
        let requests: u64 = operations.iter().map(|d| d.ios).sum();
        let in_flight: u64 = workers.iter().map(|m| m.in_flight_at_end).sum();
        let oldest = workers.iter().map(|m| m.oldest_in_flight).max();
        let per_request = |n: u64| n as f64 / (requests.max(1)) as f64;
        let sum = |f: fn(&Measured) -> u64| workers.iter().map(f).sum::<u64>();
        let backend = match (outcome.backend_cpu_ns, backend_pid) {
            (Some(ns), Some(pid)) => Some(Backend {
                pid,
                cpu_us_per_request: per_request(ns) / 1e3,
                cpu_percent: ns as f64 / seconds.max(1e-9) / 1e7,
            }),
            _ => None,
        };
        let (target, engine, wait) = names(&options.target);
        Report {
            target,
            engine,
            rw: load.rw.name().into(),
            bs: load.bs,
            iodepth: load.iodepth,
            queues: load.queues,
            wait,
            runtime: seconds,
            iops: operations.iter().map(|d| d.iops).sum(),
            mb_per_s: operations.iter().map(|d| d.mb_per_s).sum(),
            operations,
            in_flight_at_end: in_flight,
            oldest_in_flight_ns: oldest
                .filter(|_| in_flight > 0)
                .map(|ticks| ticks as f64 * outcome.ns_per_tick),
            client_cpu_us_per_request: per_request(sum(|m| m.cpu_ns)) / 1e3,
            backend,
            kicks_per_request: per_request(sum(|m| m.kicks)),
            calls_per_request: per_request(sum(|m| m.calls)),
            errors: sum(|m| m.errors),
            reconnects: 0,
            verify: verified(workers),
            dirty_log_pages: match &options.target {
                Target::VhostUser(v) if v.log => Some(sum(|m| m.log_pages)),
                _ => None,
            },
        }
    }

    /// Returns the results of an operation, or `None` if no such request completed.
    pub fn operation(&self, op: Op) -> Option<&Direction> {
        self.operations.iter().find(|d| d.op == op.name())
    }
}

fn directions(load: &Load, workers: &[Measured], ns_per_tick: f64, seconds: f64) -> Vec<Direction> {
    let one = |op: Op| {
        let mut all = Counts::default();
        workers
            .iter()
            .for_each(|m| all.merge(&m.latency[op as usize]));
        let ios: u64 = workers.iter().map(|m| m.in_window[op as usize]).sum();
        let iops = ios as f64 / seconds.max(1e-9);
        let bytes = if op == Op::Flush { 0 } else { load.bs };
        Direction {
            op: op.name().into(),
            ios,
            iops,
            mb_per_s: iops * f64::from(bytes) / 1e6,
            latency: Latency::of(&all, ns_per_tick),
            histogram: buckets(&all, ns_per_tick),
        }
    };
    // All requests of a stalled operation may have completed after the window.
    let happened = |d: &Direction| d.ios > 0 || !d.histogram.is_empty();
    Op::ALL.map(one).into_iter().filter(happened).collect()
}

fn buckets(ticks: &Counts<FINE>, ns_per_tick: f64) -> Vec<Bucket> {
    let ns = |ticks| ticks as f64 * ns_per_tick;
    let occupied = ticks.occupied();
    occupied
        .map(|(from, to, n)| Bucket(ns(from), ns(to), n))
        .collect()
}

fn names(target: &Target) -> (String, String, String) {
    let wait = |w: Wait| match w {
        Wait::Interrupt => "interrupt".to_owned(),
        Wait::Poll => "poll".to_owned(),
    };
    match target {
        Target::VhostUser(v) => (
            v.socket.display().to_string(),
            "vhost-user".into(),
            wait(v.wait),
        ),
        Target::Nbd(n) => (n.uri.to_string(), "nbd".into(), wait(n.wait)),
        Target::File(f) => (
            f.path.display().to_string(),
            f.engine.name().into(),
            wait(f.wait),
        ),
    }
}

fn verified(workers: &[Measured]) -> Option<Verified> {
    workers.iter().map(|m| m.verified).reduce(|a, b| {
        let (a, b) = (a?, b?);
        Some(Verified {
            written: a.written + b.written,
            checked: a.checked + b.checked,
        })
    })?
}

impl Report {
    fn fmt_measured(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<13}{:>11} {:>9}", "latency in us", "IOPS", "MB/s")?;
        Latency::write_head(f)?;
        for d in &self.operations {
            write!(f, "{:<13}{:>11.0} {:>9.1}", d.op, d.iops, d.mb_per_s)?;
            d.latency.write_columns(f)?;
        }
        if let Some(oldest) = self.oldest_in_flight_ns {
            writeln!(
                f,
                "in flight at the end: {}, the oldest for {:.2} us; their latencies are above",
                self.in_flight_at_end,
                oldest / 1e3
            )?;
        }
        write!(
            f,
            "per request: client CPU {:.3} us",
            self.client_cpu_us_per_request
        )?;
        if let Some(b) = &self.backend {
            write!(
                f,
                ", backend CPU {:.3} us (pid {}, {:.0} % of a CPU)",
                b.cpu_us_per_request, b.pid, b.cpu_percent
            )?;
        }
        writeln!(
            f,
            ", kicks {:.3}, calls {:.3}",
            self.kicks_per_request, self.calls_per_request
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} {} bytes, iodepth {}, queues {}, {} ({}), {:.1} s",
            self.target,
            self.rw,
            self.bs,
            self.iodepth,
            self.queues,
            self.engine,
            self.wait,
            self.runtime
        )?;
        if !self.operations.is_empty() {
            self.fmt_measured(f)?;
        }
        if let Some(v) = &self.verify {
            writeln!(
                f,
                "verify: {} blocks written, {} read and right",
                v.written, v.checked
            )?;
        }
        if let Some(pages) = self.dirty_log_pages {
            writeln!(f, "dirty log: {pages} written pages, all marked")?;
        }
        if self.reconnects > 0 {
            writeln!(f, "reconnects: {}", self.reconnects)?;
        }
        if self.errors > 0 {
            writeln!(f, "errors: {} requests failed", self.errors)?;
        }
        Ok(())
    }
}
