//! The contents of a report, in every form: each table and picture is drawn from an [`Analysis`],
//! and its JSON form is the JSON report.
//!
//! Times are in ns of the host's CLOCK_MONOTONIC; times of a request are relative to its start.

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
    /// The non-empty buckets for curves, rising: (upper end of the bucket, samples in it).
    pub buckets: Vec<(i64, u64)>,
}

/// A request, followed through all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Joined {
    /// The request's number, in order of the calls.
    pub number: u64,
    /// `read`, `write`, `flush`, `discard`.
    pub operation: &'static str,
    /// The first byte on the guest's disk; the length is in bytes too.
    pub offset: u64,
    pub length: u64,
    /// The time of the call, in ns of the host's CLOCK_MONOTONIC.
    pub start: i64,
    /// The points that were seen, in ns after the start.
    pub points: Vec<(Point, i64)>,
    /// Time in each layer; the sum is `total` exactly. A time is negative where clocks disagree.
    pub layers: Vec<(Layer, i64)>,
    pub total: i64,
    pub delivery: Delivery,
    /// Number of requests that the kick announced, this one included; 0 when polled or unknown.
    pub batch: u32,
    pub host: HostClass,
}

/// How the server learnt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivery {
    /// By the request's own kick.
    Kicked,
    /// By the kick of another request of its batch.
    Batched,
    /// By polling, without a kick.
    Polled,
    Unknown,
}

/// How the host's block layer carried out a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostClass {
    /// A single host request for one guest request.
    Direct,
    /// Several host requests for one guest request.
    Split,
    /// A single host request for several guest requests.
    Merged,
    /// No host request: the page cache or memory served the request.
    Cached,
    /// No request on this host: another host's server did the I/O.
    Remote,
    /// Not traced, or not identified.
    Unknown,
}

/// A row of the exact breakdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRow {
    pub layer: Layer,
    pub group: Group,
    /// The layer's name in tables.
    pub name: &'static str,
    /// Over all joined requests; a request that does not pass the layer counts as 0.
    pub time: Distribution,
    /// Share of the mean total.
    pub share: f64,
    /// Mean over the requests around the median, the middle tenth by total: the time that an
    /// ordinary request spends in the layer. The means of layers add up; their medians do not.
    pub middle_mean: Option<f64>,
    /// Mean over the slowest 1% of the requests, and the layer's share of their mean total.
    pub tail_mean: Option<f64>,
    pub tail_share: Option<f64>,
    /// Number of requests in which the layer's time came out negative.
    pub negative: u64,
}

/// How far a join can be trusted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Truth {
    pub requests: u64,
    pub joined: u64,
    /// Number of guest requests without a counterpart.
    pub unmatched: u64,
    /// Number of requests with several possible counterparts; joined first in, first out.
    pub ambiguous: u64,
    /// Number of joined requests that lack a point that was watched in their round: an event is
    /// missing. The time around the point belongs to a wider layer.
    pub incomplete: u64,
    /// Number of events that contradict others: kicks without a request, doorbells that no guest
    /// wrote, server requests that no guest made, interrupts that no guest took.
    pub inconsistent: u64,
    /// How the guest's clock was related to the host's, as text for the reader.
    pub clock_method: String,
    /// The largest possible error of that relation, in ns.
    pub clock_error_ns: Option<i64>,
    /// How the remote host's clock was related, and its error; None where none was watched.
    pub remote_clock_method: Option<String>,
    pub remote_clock_error_ns: Option<i64>,
    /// Number of effects seen before their causes by more than that error.
    pub violations: u64,
    /// Number of dropped events, by stream. A dropped event makes tails unreliable.
    pub lost: Vec<(String, u64)>,
    pub kicked: u64,
    pub batched: u64,
    pub polled: u64,
    pub hosts: Vec<(HostClass, u64)>,
}

/// The exact breakdown of one traced round, or of all of them together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Exact {
    pub total: Distribution,
    /// In the order of [`Layer`], without layers that no request passed.
    pub layers: Vec<LayerRow>,
    pub truth: Truth,
    /// The slowest requests, slowest first; some dozens.
    pub slowest: Vec<Joined>,
    /// Requests by start and latency.
    pub heat: HeatMap,
}

/// Counts by time (columns) and latency (rows, log scale).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatMap {
    /// The left edge of each column in ns after the first request; then the width of a column.
    pub start: Vec<i64>,
    pub column_ns: i64,
    /// Lower edges of the rows, in ns.
    pub latency: Vec<i64>,
    /// The non-zero cells: (column, row, requests).
    pub cells: Vec<(u32, u32, u64)>,
}

/// The two tables of the KVM wiki.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Wiki {
    /// (layer, cumulative latency in ns, the guest benchmark's own mean in those rounds).
    pub cumulative: Vec<(String, f64, Option<f64>)>,
    /// (layer, difference in ns, percent of the guest benchmark).
    pub delta: Vec<(String, f64, f64)>,
    /// Why a row is missing, and other notes on the tables.
    pub notes: Vec<String>,
}

/// A kind of system call of one thread, and the time in user space after it.
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

/// A thread's waits for one lock.
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

/// A step between two events of QEMU, in the wiki's order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QemuStep {
    /// The wiki's name for the event, and today's name; `none` if the event has no successor.
    pub wiki: String,
    pub today: String,
    pub time: Distribution,
}

/// Activities of a thread over time, for a picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeLine {
    pub thread: Thread,
    /// (start, end, activity) in ns from the window's start: a system call's name, or `user`.
    pub spans: Vec<(i64, i64, String)>,
}

/// The part of a round that the time lines show.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Picture {
    pub round: String,
    /// Length of the window in ns.
    pub length: i64,
    /// The round's slowest request, on which the window is centred. None: the window begins at the
    /// middle of the round, and `why_not` gives the reason.
    pub request: Option<Pictured>,
    pub why_not: Option<String>,
}

/// The request that a picture shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pictured {
    /// The request's number, in order of the calls of its round.
    pub number: u64,
    pub operation: &'static str,
    pub offset: u64,
    pub length: u64,
    /// Start in ns from the window's start; `total` is the duration in ns.
    pub start: i64,
    pub total: i64,
}

/// The cost of tracing: the difference between traced and untraced rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overhead {
    /// The collectors of the traced rounds.
    pub traced: Vec<String>,
    pub traced_ns: f64,
    pub untraced_ns: f64,
    /// Mean difference in ns per request, and its 95% interval (bootstrap over pairs of rounds).
    pub difference_ns: f64,
    pub low_ns: f64,
    pub high_ns: f64,
    pub pairs: u32,
}

/// The benchmark's own figures in a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoundRow {
    pub name: String,
    pub traced: Vec<String>,
    pub on_host: bool,
    pub benchmark: Option<Benchmark>,
}

/// Everything that a report says about a run.
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
    /// The run's own problems and the limits of the analysis, a line each.
    pub problems: Vec<String>,
}

impl Exact {
    /// Returns whether a layer stands for several layers that could not be separated: either always
    /// ([`Layer::is_gap`]), or because the host's block layer was not watched.
    pub fn is_gap(&self, layer: Layer) -> bool {
        let of = |class| self.truth.hosts.iter().any(|(host, _)| *host == class);
        let io = layer == Layer::HostIo && of(HostClass::Unknown) && !of(HostClass::Cached);
        io || layer.is_gap()
    }
}
