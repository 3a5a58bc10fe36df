//! Report of a load on files, as text and as JSON.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mail::Kind;
use super::options::Options;
use super::worker::{Measured, Tally};
use crate::report::Latency;
use crate::verify::Verified;

/// Results of one kind of operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    /// Name of the operation: [`Kind::name`], or fio's name.
    pub op: String,
    /// Number of whole operations, from open to close.
    pub ops: u64,
    /// Number of transfers of at most one block, as counted by FFSB. An operation without transfers
    /// counts as one.
    pub ios: u64,
    /// Number of bytes read and written.
    pub bytes: u64,
    /// Number of whole operations per second.
    pub ops_per_s: f64,
    /// Number of `ios` per second.
    pub iops: f64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Latency of whole operations.
    pub latency: Latency,
    /// Histogram of the latency of whole operations: from, to (exclusive) in ns, and count. Empty
    /// for fio.
    pub histogram: Vec<[u64; 3]>,
}

/// Report of a whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Directory of the load, as in the options.
    pub directory: PathBuf,
    /// Name of the load: `mail-server`, `names`, or fio's scenario.
    pub workload: String,
    /// Size of a transfer in bytes; 0 for a load without transfers.
    pub bs: u32,
    /// Number of threads.
    pub threads: u16,
    /// Whether O_DIRECT was used.
    pub direct: bool,
    /// Number of files before the load.
    pub files: u64,
    /// Number of directories that contain the files.
    pub dirs: u64,
    /// Time in seconds to create the files. `None` if they existed already.
    pub prepare: Option<f64>,
    /// Measured time in seconds, including the final sync.
    pub runtime: f64,
    /// Time of the final sync in seconds. `None` if it is not measured separately.
    pub sync: Option<f64>,
    /// Sums over all operations.
    pub iops: f64,
    /// Throughput of all operations in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Results by kind of operation, without kinds that were not performed.
    pub operations: Vec<Operation>,
    /// CPU time of the threads per transfer in microseconds.
    pub client_cpu_us_per_request: f64,
    /// Numbers of verified blocks; `None` without verification.
    pub verify: Option<Verified>,
    /// Path of the files, if they were kept.
    pub kept: Option<PathBuf>,
}

/// Duration of the measured part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    /// Time from the first operation to the end of the final sync.
    pub run: Duration,
    /// Time of the final sync, which is a part of `run`.
    pub sync: Duration,
}

impl Report {
    /// Combines the measurements of all threads.
    pub fn new(
        options: &Options,
        prepared: Option<Duration>,
        taken: Taken,
        measured: &[Measured],
        ns_per_tick: f64,
    ) -> Report {
        let seconds = taken.run.as_secs_f64();
        let operations: Vec<Operation> = Kind::ALL
            .map(|kind| operation(kind, &total(kind, measured), seconds, ns_per_tick))
            .into_iter()
            .filter(|o| o.ops > 0)
            .collect();
        let ios: u64 = operations.iter().map(|o| o.ios).sum();
        let cpu_ns: u64 = measured.iter().map(|m| m.cpu_ns).sum();
        let verified = measured.iter().map(|m| m.verified);
        Report {
            directory: options.dir.clone(),
            workload: "mail-server".into(),
            bs: options.bs,
            threads: options.threads,
            direct: options.direct,
            files: options.files.into(),
            dirs: options.dirs.into(),
            prepare: prepared.map(|time| time.as_secs_f64()),
            runtime: seconds,
            sync: Some(taken.sync.as_secs_f64()),
            iops: operations.iter().map(|o| o.iops).sum(),
            mb_per_s: operations.iter().map(|o| o.mb_per_s).sum(),
            client_cpu_us_per_request: cpu_ns as f64 / ios.max(1) as f64 / 1e3,
            operations,
            verify: options.verify.then(|| Verified {
                written: verified.clone().map(|v| v.written).sum(),
                checked: verified.map(|v| v.checked).sum(),
            }),
            kept: None,
        }
    }

    /// Returns the results of an operation by its name, or `None` if no such operation was
    /// performed.
    pub fn operation(&self, op: &str) -> Option<&Operation> {
        self.operations.iter().find(|o| o.op == op)
    }
}

fn total(kind: Kind, measured: &[Measured]) -> Tally {
    let mut total = Tally::default();
    for tally in measured.iter().map(|m| &m.kinds[kind as usize]) {
        total.latency.merge(&tally.latency);
        total.moved.ios += tally.moved.ios;
        total.moved.bytes += tally.moved.bytes;
    }
    total
}

fn operation(kind: Kind, total: &Tally, seconds: f64, ns_per_tick: f64) -> Operation {
    let per_second = |n: u64| n as f64 / seconds.max(1e-9);
    let (ops, moved) = (total.latency.count(), total.moved);
    let ns = |ticks: u64| (ticks as f64 * ns_per_tick).round() as u64;
    let occupied = total.latency.occupied();
    Operation {
        op: kind.name().into(),
        ops,
        ios: moved.ios,
        bytes: moved.bytes,
        ops_per_s: per_second(ops),
        iops: per_second(moved.ios),
        mb_per_s: per_second(moved.bytes) / 1e6,
        latency: Latency::of(&total.latency, ns_per_tick),
        histogram: { occupied }
            .map(|(from, to, n)| [ns(from), ns(to), n])
            .collect(),
    }
}

impl Report {
    fn fmt_head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.direct { "O_DIRECT" } else { "buffered" };
        let (threads, plural) = (self.threads, if self.threads == 1 { "" } else { "s" });
        write!(
            f,
            "{}: {} {} bytes, {threads} thread{plural}, {} files in {} directories ({how}), {:.1} s",
            self.directory.display(),
            self.workload,
            self.bs,
            self.files,
            self.dirs,
            self.runtime
        )?;
        match self.sync {
            Some(seconds) => writeln!(f, ", {seconds:.2} s of them the last sync"),
            None => writeln!(f),
        }
    }

    fn fmt_measured(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<13}{:>10} {:>10} {:>9}",
            "latency in us", "op/s", "IOPS", "MB/s"
        )?;
        Latency::write_head(f)?;
        for o in &self.operations {
            write!(
                f,
                "{:<13}{:>10.0} {:>10.0} {:>9.1}",
                o.op, o.ops_per_s, o.iops, o.mb_per_s
            )?;
            o.latency.write_columns(f)?;
        }
        let ops: f64 = self.operations.iter().map(|o| o.ops_per_s).sum();
        writeln!(
            f,
            "{:<13}{ops:>10.0} {:>10.0} {:>9.1}",
            "all", self.iops, self.mb_per_s
        )?;
        writeln!(
            f,
            "per I/O: client CPU {:.3} us",
            self.client_cpu_us_per_request
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_head(f)?;
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
        match &self.kept {
            Some(path) => writeln!(f, "the files are in {}", path.display()),
            None => Ok(()),
        }
    }
}
