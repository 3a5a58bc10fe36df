//! What a report says, whatever it looks like: every table and picture is drawn from an
//! [`Analysis`], and its JSON form is the JSON report.
//!
//! Times are nanoseconds of the host's CLOCK_MONOTONIC; of a request, relative to its start.

mod layer;

use fathom_run::{Benchmark, Disk, Environment, RunKind, Scenario, Thread};
use serde::Serialize;

pub use layer::{Group, Layer, Point};

/// Statistics of one distribution, in ns. A percentile with fewer than ten samples beyond it is
/// None.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    pub count: u64,
    pub mean: f64,
    pub deviation: f64,
    pub min: i64,
    pub max: i64,
    pub p50: Option<i64>,
    pub p90: Option<i64>,
    pub p99: Option<i64>,
    pub p999: Option<i64>,
    /// (upper end of a bucket, samples in it) of the non-empty buckets, rising; for curves.
    pub buckets: Vec<(i64, u64)>,
}

/// One request, followed through all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Joined {
    /// In order of the calls.
    pub number: u64,
    /// `read`, `write`, `flush`, `discard`.
    pub operation: &'static str,
    /// Bytes on the guest's disk.
    pub offset: u64,
    pub length: u64,
    /// The call, in ns of the host's CLOCK_MONOTONIC.
    pub start: i64,
    /// Points that were seen, after the start.
    pub points: Vec<(Point, i64)>,
    /// They add up to `total` exactly; one may be negative where clocks disagree.
    pub layers: Vec<(Layer, i64)>,
    pub total: i64,
    pub delivery: Delivery,
    /// Requests that its kick brought, itself included; 0 when polled or unknown.
    pub batch: u32,
    pub host: HostClass,
}

/// How the server learnt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivery {
    /// Its own kick.
    Kicked,
    /// The kick of another request of its batch.
    Batched,
    /// The server looked by itself.
    Polled,
    Unknown,
}

/// What the host's block layer made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostClass {
    /// One request of the host's for one of the guest's.
    Direct,
    /// Several for one.
    Split,
    /// One for several.
    Merged,
    /// None: the page cache, or memory.
    Cached,
    /// None here: another host's server did it.
    Remote,
    /// Not traced, or not identified.
    Unknown,
}

/// A row of the exact breakdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRow {
    pub layer: Layer,
    pub group: Group,
    /// The name in tables.
    pub name: &'static str,
    /// Over all joined requests; a request that does not pass the layer counts as 0.
    pub time: Distribution,
    /// Share of the mean total.
    pub share: f64,
    /// Mean over the requests around the median, the middle tenth by their totals: what an ordinary
    /// request spends there. These add up, which medians of layers do not.
    pub middle_mean: Option<f64>,
    /// Mean over the requests of the p99 band (the slowest 1%), and its share there.
    pub tail_mean: Option<f64>,
    pub tail_share: Option<f64>,
    /// Requests in which it came out negative.
    pub negative: u64,
}

/// How far a join can be trusted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Truth {
    pub requests: u64,
    pub joined: u64,
    /// Requests of the guest without their counterpart, and the share of all.
    pub unmatched: u64,
    /// Requests that had more than one possible counterpart; joined first in, first out.
    pub ambiguous: u64,
    /// Joined requests that lack a point although it was watched in their round: an event of theirs
    /// is missing. The time around it went to a wider layer.
    pub incomplete: u64,
    /// Events that contradict the others: kicks that bring nothing, doorbells that no guest wrote,
    /// requests of the server that no guest made, interrupts that nobody took.
    pub inconsistent: u64,
    /// How the guest's clock was related to the host's, for people.
    pub clock_method: String,
    /// The largest error that the relation of the clocks can have, in ns.
    pub clock_error_ns: Option<i64>,
    /// The same of the remote host's clock; None where none was watched.
    pub remote_clock_method: Option<String>,
    pub remote_clock_error_ns: Option<i64>,
    /// Effects seen before their causes by more than that error.
    pub violations: u64,
    /// Events dropped, by stream; a dropped event invalidates tails.
    pub lost: Vec<(String, u64)>,
    pub kicked: u64,
    pub batched: u64,
    pub polled: u64,
    pub hosts: Vec<(HostClass, u64)>,
}

/// The exact breakdown of one traced round (or of all of them together).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Exact {
    pub total: Distribution,
    /// In the order of [`Layer`]; layers that no request passed are left out.
    pub layers: Vec<LayerRow>,
    pub truth: Truth,
    /// Slowest first, some dozens.
    pub slowest: Vec<Joined>,
    /// Requests by start and latency.
    pub heat: HeatMap,
}

/// Counts by time (columns) and latency (rows, log scale).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatMap {
    /// ns from the first request to the left edge of each column, and the width of all.
    pub start: Vec<i64>,
    pub column_ns: i64,
    /// Lower edges of the rows in ns.
    pub latency: Vec<i64>,
    /// (column, row, requests), non-zero ones.
    pub cells: Vec<(u32, u32, u64)>,
}

/// The wiki's two tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Wiki {
    /// Layer, cumulative latency in ns, the guest benchmark's own figure in that round.
    pub cumulative: Vec<(String, f64, Option<f64>)>,
    /// Layer, difference in ns, percent of the guest benchmark.
    pub delta: Vec<(String, f64, f64)>,
    /// Why a row is missing.
    pub notes: Vec<String>,
}

/// One kind of system call of one thread, and the time in user space after it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRow {
    pub name: String,
    pub time: Distribution,
    pub post: Distribution,
    /// Sum of `time` and of `post` in ns.
    pub total: i64,
    pub post_total: i64,
}

/// The system calls of one thread.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ThreadCalls {
    pub thread: Thread,
    pub calls: Vec<CallRow>,
}

/// One thread's waits for one lock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LockRow {
    pub thread: Thread,
    pub address: u64,
    pub name: Option<String>,
    /// `futex` or `qemu mutex`.
    pub source: &'static str,
    pub time: Distribution,
    pub total: i64,
}

/// A step between two events of QEMU's, in the wiki's order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QemuStep {
    /// The wiki's name for the event, and today's; `none` where there is no successor.
    pub wiki: String,
    pub today: String,
    pub time: Distribution,
}

/// What a thread did when, for a picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeLine {
    pub thread: Thread,
    /// (start, end, what) in ns from the window's start: a system call's name, or `user`.
    pub spans: Vec<(i64, i64, String)>,
}

/// Which moment the time lines show.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Picture {
    pub round: String,
    /// Of the window, in ns.
    pub length: i64,
    /// What it is centred on: the round's slowest request. None: the window begins at the middle of
    /// the round, and `why_not` says why.
    pub request: Option<Pictured>,
    pub why_not: Option<String>,
}

/// The request that a picture shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pictured {
    /// In order of the calls of its round.
    pub number: u64,
    pub operation: &'static str,
    pub offset: u64,
    pub length: u64,
    /// In ns from the window's start.
    pub start: i64,
    pub total: i64,
}

/// What tracing costs: the difference between traced and untraced rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overhead {
    /// The collectors of the traced rounds.
    pub traced: Vec<String>,
    pub traced_ns: f64,
    pub untraced_ns: f64,
    /// Difference in ns a request and its 95% interval (bootstrap over pairs of rounds).
    pub difference_ns: f64,
    pub low_ns: f64,
    pub high_ns: f64,
    pub pairs: u32,
}

/// The benchmark's own figure in a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoundRow {
    pub name: String,
    pub traced: Vec<String>,
    pub on_host: bool,
    pub benchmark: Option<Benchmark>,
}

/// Everything that is said about a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Analysis {
    pub kind: RunKind,
    pub title: String,
    pub created: u64,
    pub scenario: Option<Scenario>,
    pub environment: Environment,
    pub disks: Vec<Disk>,
    pub rounds: Vec<RoundRow>,
    pub exact: Option<Exact>,
    pub wiki: Option<Wiki>,
    pub calls: Vec<ThreadCalls>,
    pub locks: Vec<LockRow>,
    pub qemu: Vec<QemuStep>,
    pub time_lines: Vec<TimeLine>,
    pub picture: Option<Picture>,
    pub overhead: Vec<Overhead>,
    /// The run's own problems and what the analysis could not do, a line each.
    pub problems: Vec<String>,
}

impl Exact {
    /// Whether a layer stands for others that were not told apart here: as always
    /// ([`Layer::is_gap`]), or because the host's block layer was not watched.
    pub fn is_gap(&self, layer: Layer) -> bool {
        let of = |class| self.truth.hosts.iter().any(|(host, _)| *host == class);
        let io = layer == Layer::HostIo && of(HostClass::Unknown) && !of(HostClass::Cached);
        io || layer.is_gap()
    }
}
