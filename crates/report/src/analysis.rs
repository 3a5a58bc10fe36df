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
    /// Number of values; all other figures are 0 or None if it is 0.
    pub count: u64,
    /// Arithmetic mean in ns.
    pub mean: f64,
    /// Sample standard deviation in ns; 0 with fewer than two values.
    pub deviation: f64,
    /// Smallest value in ns.
    pub min: i64,
    /// Largest value in ns.
    pub max: i64,
    /// Median in ns.
    pub p50: Option<i64>,
    /// 90th percentile in ns.
    pub p90: Option<i64>,
    /// 99th percentile in ns.
    pub p99: Option<i64>,
    /// 99.9th percentile in ns.
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
    /// The offset in bytes of the first byte on the guest's disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The time of the call, in ns of the host's CLOCK_MONOTONIC.
    pub start: i64,
    /// The points that were seen, in ns after the start.
    pub points: Vec<(Point, i64)>,
    /// Time in each layer; the sum is `total` exactly. A time is negative where clocks disagree.
    pub layers: Vec<(Layer, i64)>,
    /// Time from the call to its return in ns.
    pub total: i64,
    /// How the server learnt of the request.
    pub delivery: Delivery,
    /// Number of requests that the kick announced, this one included; 0 when polled or unknown.
    pub batch: u32,
    /// How the host's block layer carried out the request.
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
    /// The events do not show how the server learnt of the request.
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
    /// Layer of this row.
    pub layer: Layer,
    /// Group to which the layer belongs.
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
    /// Mean over the slowest 1% of the requests in ns; None if they are fewer than ten.
    pub tail_mean: Option<f64>,
    /// Share of the layer in the mean total of the slowest 1%; None if they are fewer than ten.
    pub tail_share: Option<f64>,
    /// Number of requests in which the layer's time came out negative.
    pub negative: u64,
}

/// How far a join can be trusted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Truth {
    /// Number of the guest's requests, whether they were joined or not.
    pub requests: u64,
    /// Number of requests that were followed through the layers.
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
    /// Number of requests that were in flight when the recording ended; `requests` excludes them.
    pub in_flight: u64,
    /// Time in ns from the start of the oldest of them to the recording's end; None without any.
    pub oldest_in_flight_ns: Option<i64>,
    /// How the guest's clock was related to the host's, as text for the reader.
    pub clock_method: String,
    /// The largest possible error of that relation, in ns.
    pub clock_error_ns: Option<i64>,
    /// How the remote host's clock was related to this host's; None where none was watched.
    pub remote_clock_method: Option<String>,
    /// Largest possible error of the remote clock's relation in ns; None where it is not known.
    pub remote_clock_error_ns: Option<i64>,
    /// Number of effects seen before their causes by more than that error.
    pub violations: u64,
    /// Number of dropped events, by stream. A dropped event makes tails unreliable.
    pub lost: Vec<(String, u64)>,
    /// Number of joined requests that their own kick announced.
    pub kicked: u64,
    /// Number of joined requests that another request's kick announced.
    pub batched: u64,
    /// Number of joined requests that the server found by polling.
    pub polled: u64,
    /// Number of joined requests in each class, without empty classes.
    pub hosts: Vec<(HostClass, u64)>,
}

/// The exact breakdown of one traced round, or of all of them together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Exact {
    /// Time from call to return of all joined requests.
    pub total: Distribution,
    /// In the order of [`Layer`], without layers that no request passed.
    pub layers: Vec<LayerRow>,
    /// How far the figures can be trusted.
    pub truth: Truth,
    /// The slowest requests, slowest first; some dozens.
    pub slowest: Vec<Joined>,
    /// Requests by start and latency.
    pub heat: HeatMap,
}

/// Counts by time (columns) and latency (rows, log scale).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatMap {
    /// The left edge of each column in ns after the first column's.
    pub start: Vec<i64>,
    /// Width of a column in ns.
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
    /// Name of the system call.
    pub name: String,
    /// Time in the system call.
    pub time: Distribution,
    /// Time in user space from the call's return to the thread's next call.
    pub post: Distribution,
    /// Sum of `time` in ns.
    pub total: i64,
    /// Sum of `post` in ns.
    pub post_total: i64,
}

/// The system calls of one thread.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ThreadCalls {
    /// Thread that made the calls.
    pub thread: Thread,
    /// Kinds of calls, those with the longest total time first.
    pub calls: Vec<CallRow>,
}

/// A thread's waits for one lock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LockRow {
    /// Thread that waited.
    pub thread: Thread,
    /// Address of the futex or mutex in the memory of the thread's process.
    pub address: u64,
    /// Symbol of the futex, or place in QEMU's source that takes the mutex; None if it is not
    /// known.
    pub name: Option<String>,
    /// `futex` or `qemu mutex`.
    pub source: &'static str,
    /// Durations of the waits.
    pub time: Distribution,
    /// Sum of the waits in ns.
    pub total: i64,
}

/// A step between two events of QEMU, in the wiki's order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QemuStep {
    /// The wiki's name for the event.
    pub wiki: String,
    /// Name of the event in this version of QEMU; `none` if the event has no successor.
    pub today: String,
    /// Time of the step; empty for an event without a successor.
    pub time: Distribution,
}

/// Activities of a thread over time, for a picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeLine {
    /// Thread whose activities are shown.
    pub thread: Thread,
    /// (start, end, activity) in ns from the window's start: a system call's name, or `user`.
    pub spans: Vec<(i64, i64, String)>,
}

/// The part of a round that the time lines show.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Picture {
    /// Name of the round whose threads are shown.
    pub round: String,
    /// Length of the window in ns.
    pub length: i64,
    /// The round's slowest request, on which the window is centred. None: the window begins at the
    /// middle of the round, and `why_not` gives the reason.
    pub request: Option<Pictured>,
    /// Why no request is shown; None if `request` is set.
    pub why_not: Option<String>,
}

/// The request that a picture shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pictured {
    /// The request's number, in order of the calls of its round.
    pub number: u64,
    /// Name of the operation, as in [`Joined::operation`].
    pub operation: &'static str,
    /// Offset of the first byte on the guest's disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Start in ns from the window's start.
    pub start: i64,
    /// Duration in ns.
    pub total: i64,
}

/// The cost of tracing: the difference between traced and untraced rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overhead {
    /// The collectors of the traced rounds.
    pub traced: Vec<String>,
    /// Mean time of a request in the traced rounds in ns, as the benchmark measured it.
    pub traced_ns: f64,
    /// Mean time of a request in ns in the untraced rounds nearest to the traced ones.
    pub untraced_ns: f64,
    /// Mean difference in ns per request.
    pub difference_ns: f64,
    /// Low end of the interval in ns.
    pub low_ns: f64,
    /// High end of the interval in ns.
    pub high_ns: f64,
    /// Number of pairs of a traced and an untraced round.
    pub pairs: u32,
}

/// The benchmark's own figures in a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoundRow {
    /// Name of the round.
    pub name: String,
    /// Names of the collectors that traced the round; empty for a control round.
    pub traced: Vec<String>,
    /// Whether the work ran on the host itself, without a guest.
    pub on_host: bool,
    /// Benchmark's results; None if no benchmark ran.
    pub benchmark: Option<Benchmark>,
}

/// Everything that a report says about a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Analysis {
    /// Origin of the run.
    pub kind: RunKind,
    /// Title of the run, for headings.
    pub title: String,
    /// Start time of the run in seconds since 1970.
    pub created: u64,
    /// Work that every round did; None if it is not known.
    pub scenario: Option<Scenario>,
    /// Machines and versions of the programs.
    pub environment: Environment,
    /// Disks of the guest.
    pub disks: Vec<Disk>,
    /// Rounds in the order in which they ran.
    pub rounds: Vec<RoundRow>,
    /// Breakdown of the joined requests of all rounds; None if no request was joined.
    pub exact: Option<Exact>,
    /// Tables of the KVM wiki; None if the run has no rounds for them.
    pub wiki: Option<Wiki>,
    /// System calls by thread; empty if they were not traced.
    pub calls: Vec<ThreadCalls>,
    /// Waits for locks by thread and lock, those with the longest total time first.
    pub locks: Vec<LockRow>,
    /// Steps between QEMU's own events; empty if they were not traced.
    pub qemu: Vec<QemuStep>,
    /// Time lines of the threads, all of the same window.
    pub time_lines: Vec<TimeLine>,
    /// Window of the time lines; None without time lines.
    pub picture: Option<Picture>,
    /// Cost of tracing, for each set of collectors.
    pub overhead: Vec<Overhead>,
    /// The run's own problems and the limits of the analysis, a line each.
    pub problems: Vec<String>,
}

impl Exact {
    /// Returns a layer's name in this run.
    pub fn name_of(&self, layer: Layer) -> &'static str {
        layer.name(self.is_gap(layer))
    }

    /// Returns whether a layer stands for several layers that could not be separated: either always
    /// ([`Layer::is_gap`]), or because the host's block layer was not watched.
    pub fn is_gap(&self, layer: Layer) -> bool {
        let of = |class| self.truth.hosts.iter().any(|(host, _)| *host == class);
        let io = layer == Layer::HostIo && of(HostClass::Unknown) && !of(HostClass::Cached);
        io || layer.is_gap()
    }
}
