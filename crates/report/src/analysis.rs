//! What a report says, whatever it looks like: every table and picture is drawn from an
//! [`Analysis`], and its JSON form is the JSON report.
//!
//! Times are nanoseconds of the host's CLOCK_MONOTONIC; of a request, relative to its start.

use fathom_run::{Benchmark, Disk, Environment, RunKind, Scenario, Thread};
use serde::Serialize;

/// A point on a request's way. In this order a request passes them; those that nobody saw are
/// missing, and the time on both sides of a missing point belongs to one layer (see
/// [`Layer::between`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// The benchmark calls read() or write().
    Call,
    /// The guest's block layer has the bio.
    Bio,
    /// The guest's driver has the request; it is put into the ring at once.
    Issue,
    /// The guest writes the doorbell.
    Kick,
    /// The vCPU has left the guest.
    Exit,
    /// KVM signals the eventfd: its own event where a probe on it could be had, else the doorbell's,
    /// which KVM emits just before (kvm_mmio, kvm_pio) or just after (kvm_fast_mmio).
    Signal,
    /// The server has woken up.
    Wake,
    /// The server has taken the request from the ring.
    Pop,
    /// The server hands the request to its image, past its filters.
    Map,
    /// The server hands the I/O to the kernel.
    Device,
    /// The host's block layer issues it to the host's driver.
    HostIssue,
    /// The host's driver reports it done.
    HostComplete,
    /// The server has the result.
    Result,
    /// The server has put the request into the used ring.
    Used,
    /// KVM sends the interrupt.
    Interrupt,
    /// The host runs the sleeping vCPU's thread again.
    Woken,
    /// The vCPU enters the guest again (only where it had to be woken).
    Entry,
    /// The guest's interrupt handler runs.
    Handler,
    /// The guest's block layer completes the request.
    Complete,
    /// read() or write() returns.
    Return,
}

/// Where time goes. Every nanosecond between a request's call and its return is in exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// Call to Issue: system call, file system, block layer of the guest.
    GuestSubmit,
    /// Issue to Kick, or to Pop where the server polls: waiting in the ring for the batch's kick.
    GuestBatch,
    /// Kick to Exit.
    KickExit,
    /// Exit to Signal: KVM decodes the doorbell.
    KickKvm,
    /// Signal to Wake.
    ServerWake,
    /// Kick to Wake, where KVM was not watched between them.
    KickPath,
    /// Wake to Pop: waiting for the requests before it.
    ServerPop,
    /// Pop to Map: filters.
    ServerQueue,
    /// Map to Device: image metadata.
    ServerMap,
    /// Signal to HostIssue, where the server has no stamps of its own: QEMU, and the host's block
    /// layer above the driver.
    ServerIn,
    /// Wake to Device, where the server has no stamps between them.
    ServerTake,
    /// Device to HostIssue: system call and block layer of the host.
    HostSubmit,
    /// HostIssue to HostComplete.
    HostDevice,
    /// HostComplete to Result.
    HostReap,
    /// Device to Result where the host's block layer was not seen for it: page cache, memory.
    HostIo,
    /// HostComplete to Interrupt, where the server has no stamps of its own.
    ServerOut,
    /// Result to Interrupt, where the server has no stamps between them.
    ServerAnswer,
    /// Result to Used: batching of completions included.
    ServerFinish,
    /// Used to Interrupt.
    ServerNotify,
    /// Interrupt to Entry: waking the vCPU.
    VcpuWake,
    /// Interrupt to Woken: the host's scheduler.
    VcpuSchedule,
    /// Woken to Entry: KVM.
    VcpuEnter,
    /// Entry (or Interrupt, where the vCPU was in the guest or its entries were not traced) to
    /// Handler.
    InterruptEntry,
    /// Used to Handler, where KVM was not watched between them.
    InterruptPath,
    /// Kick to Handler, where nobody was watched between them: the device as the guest sees it.
    GuestDevice,
    /// Handler to Complete; Used to Complete where a handler that was running already took it.
    GuestBottomHalf,
    /// Complete to Return.
    GuestReturn,
    /// What lies between points too far apart to tell whose it is.
    Unattributed,
}

/// How the wiki grouped its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    Guest,
    /// Host/guest switching.
    Switching,
    /// Host/VMM switching.
    ServerSwitching,
    /// QEMU, or the disk's server.
    Server,
    HostIo,
    /// Everything outside the guest, where only the guest was watched.
    Device,
    Unattributed,
}

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

impl Layer {
    /// Every layer, in the order of a request's way.
    pub const ALL: &'static [Layer] = &[
        Layer::GuestSubmit,
        Layer::GuestBatch,
        Layer::KickExit,
        Layer::KickKvm,
        Layer::ServerWake,
        Layer::KickPath,
        Layer::ServerPop,
        Layer::ServerQueue,
        Layer::ServerMap,
        Layer::ServerIn,
        Layer::ServerTake,
        Layer::HostSubmit,
        Layer::HostDevice,
        Layer::HostReap,
        Layer::HostIo,
        Layer::ServerOut,
        Layer::ServerAnswer,
        Layer::ServerFinish,
        Layer::ServerNotify,
        Layer::VcpuWake,
        Layer::VcpuSchedule,
        Layer::VcpuEnter,
        Layer::InterruptEntry,
        Layer::InterruptPath,
        Layer::GuestDevice,
        Layer::GuestBottomHalf,
        Layer::GuestReturn,
        Layer::Unattributed,
    ];

    /// The points that the layer lies between; None for [`Layer::Unattributed`].
    pub fn span(self) -> Option<(Point, Point)> {
        Some(match self {
            Layer::GuestSubmit => (Point::Call, Point::Issue),
            Layer::GuestBatch => (Point::Issue, Point::Kick),
            Layer::KickExit => (Point::Kick, Point::Exit),
            Layer::KickKvm => (Point::Exit, Point::Signal),
            Layer::ServerWake => (Point::Signal, Point::Wake),
            Layer::KickPath => (Point::Kick, Point::Wake),
            Layer::ServerPop => (Point::Wake, Point::Pop),
            Layer::ServerQueue => (Point::Pop, Point::Map),
            Layer::ServerMap => (Point::Map, Point::Device),
            Layer::ServerIn => (Point::Signal, Point::HostIssue),
            Layer::ServerTake => (Point::Wake, Point::Device),
            Layer::HostSubmit => (Point::Device, Point::HostIssue),
            Layer::HostDevice => (Point::HostIssue, Point::HostComplete),
            Layer::HostReap => (Point::HostComplete, Point::Result),
            Layer::HostIo => (Point::Device, Point::Result),
            Layer::ServerOut => (Point::HostComplete, Point::Interrupt),
            Layer::ServerAnswer => (Point::Result, Point::Interrupt),
            Layer::ServerFinish => (Point::Result, Point::Used),
            Layer::ServerNotify => (Point::Used, Point::Interrupt),
            Layer::VcpuWake => (Point::Interrupt, Point::Entry),
            Layer::VcpuSchedule => (Point::Interrupt, Point::Woken),
            Layer::VcpuEnter => (Point::Woken, Point::Entry),
            Layer::InterruptEntry => (Point::Interrupt, Point::Handler),
            Layer::InterruptPath => (Point::Used, Point::Handler),
            Layer::GuestDevice => (Point::Kick, Point::Handler),
            Layer::GuestBottomHalf => (Point::Handler, Point::Complete),
            Layer::GuestReturn => (Point::Complete, Point::Return),
            Layer::Unattributed => return None,
        })
    }

    /// Whose the time between two points is, if all that lies between them went unseen: the
    /// narrowest layer whose [`span`](Self::span) holds both, else [`Layer::Unattributed`]. The
    /// join knows two more cases, which the points alone do not tell: Issue to Pop of a request
    /// that the server found by itself is [`Layer::GuestBatch`], and Used to Complete of one that a
    /// running handler took is [`Layer::GuestBottomHalf`].
    pub fn between(from: Point, to: Point) -> Layer {
        let width = |&layer: &Layer| layer.span().map_or(u8::MAX, |(a, b)| b as u8 - a as u8);
        let holds = |layer: &Layer| layer.span().is_some_and(|(a, b)| a <= from && to <= b);
        let all = Layer::ALL.iter().copied();
        all.filter(holds)
            .min_by_key(width)
            .unwrap_or(Layer::Unattributed)
    }

    /// Whether it stands for layers that were not told apart: nobody watched the points within it,
    /// or saw them.
    pub fn is_gap(self) -> bool {
        matches!(
            self,
            Layer::KickPath
                | Layer::ServerIn
                | Layer::ServerTake
                | Layer::ServerOut
                | Layer::ServerAnswer
                | Layer::InterruptPath
                | Layer::GuestDevice
                | Layer::Unattributed
        )
    }

    /// Name in tables, and group.
    pub fn describe(self) -> (&'static str, Group) {
        match self {
            Layer::GuestSubmit => ("guest: call to driver", Group::Guest),
            Layer::GuestBatch => ("guest: in the ring before the kick", Group::Guest),
            Layer::KickExit => ("kick: vCPU leaves the guest", Group::Switching),
            Layer::KickKvm => ("kick: KVM to eventfd", Group::Switching),
            Layer::ServerWake => ("kick: eventfd to server", Group::ServerSwitching),
            Layer::KickPath => ("kick: guest to server", Group::Switching),
            Layer::ServerPop => ("server: wake to taken", Group::Server),
            Layer::ServerQueue => ("server: filters", Group::Server),
            Layer::ServerMap => ("server: image metadata", Group::Server),
            Layer::ServerIn => ("server: eventfd to host's driver", Group::Server),
            Layer::ServerTake => ("server: wake to submit", Group::Server),
            Layer::HostSubmit => ("host: submit", Group::HostIo),
            Layer::HostDevice => ("host: device", Group::HostIo),
            Layer::HostReap => ("host: reap", Group::HostIo),
            Layer::HostIo => ("host: I/O without a device", Group::HostIo),
            Layer::ServerOut => ("server: host's driver to interrupt", Group::Server),
            Layer::ServerAnswer => ("server: result to interrupt", Group::Server),
            Layer::ServerFinish => ("server: finish", Group::Server),
            Layer::ServerNotify => ("server: notify", Group::ServerSwitching),
            Layer::VcpuWake => ("interrupt: vCPU wakes", Group::Switching),
            Layer::VcpuSchedule => ("interrupt: host runs the vCPU", Group::Switching),
            Layer::VcpuEnter => ("interrupt: vCPU enters the guest", Group::Switching),
            Layer::InterruptEntry => ("interrupt: to the guest's handler", Group::Switching),
            Layer::InterruptPath => ("interrupt: server to guest", Group::Switching),
            Layer::GuestDevice => ("device, as the guest sees it", Group::Device),
            Layer::GuestBottomHalf => ("guest: handler to completion", Group::Guest),
            Layer::GuestReturn => ("guest: completion to return", Group::Guest),
            Layer::Unattributed => ("unattributed", Group::Unattributed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_layers_is_in_order_and_spans_what_it_says() {
        assert!(Layer::ALL.is_sorted());
        assert_eq!(Layer::ALL.len(), Layer::Unattributed as usize + 1);
        for &layer in Layer::ALL {
            if let Some((from, to)) = layer.span() {
                assert!(from < to, "{layer:?}");
                assert_eq!(Layer::between(from, to), layer);
            }
        }
    }

    #[test]
    fn a_gap_goes_to_the_narrowest_layer_that_holds_it() {
        use Point::*;
        let cases = [
            (Call, Bio, Layer::GuestSubmit),
            (Kick, Signal, Layer::KickPath),
            (Entry, Handler, Layer::InterruptEntry),
            (Wake, Map, Layer::ServerTake),
            (Signal, Device, Layer::ServerIn),
            (Wake, HostIssue, Layer::ServerIn),
            (Used, Handler, Layer::InterruptPath),
            (Result, Handler, Layer::GuestDevice),
            (Signal, Interrupt, Layer::GuestDevice),
            (Issue, Exit, Layer::Unattributed),
            (Issue, Pop, Layer::Unattributed),
            (Used, Complete, Layer::Unattributed),
        ];
        for (from, to, layer) in cases {
            assert_eq!(Layer::between(from, to), layer, "{from:?} to {to:?}");
        }
    }
}
