//! Simulated runs, written as run directories.

pub mod browser;
pub mod example;
pub mod experiment;
pub mod judges;
pub mod page;
pub mod random;
pub mod sim;

use std::path::Path;

use fathom_report::analysis::{Analysis, Exact, Joined};
use fathom_report::{Options, analyse};
use fathom_run::{
    Benchmark, BlockDevice, Clock, Clocks, Disk, Environment, Event, Extent, GuestOffset, Kind,
    Pair, Role, Round, Run, RunKind, Scenario, StreamInfo, StreamWriter, Thread, VERSION,
};
use sim::{EXTENTS, Plan, Streams, Truth};

/// The rates and offsets of the simulated clocks.
#[derive(Clone, Copy, Debug)]
pub struct Watches {
    /// The guest's TSC minus the host's (before scaling the guest's).
    pub offset: i64,
    /// KVM's ratio, with 48 bits of fraction.
    pub ratio: Option<u64>,
    /// Whether the run contains KVM's offset.
    pub told: bool,
    /// Error of the guest's own second, in parts per million.
    pub guest_ppm: i64,
}

impl Default for Watches {
    fn default() -> Watches {
        Watches {
            offset: -987_654_321_012,
            ratio: None,
            told: true,
            guest_ppm: 0,
        }
    }
}

/// Ticks of the simulated TSC per ns.
const TICKS: u64 = 3;
const TSC_AT_ZERO: u64 = 5_000_000_000_000;
/// Time in ns after the host's boot at which the guest booted.
const GUEST_ZERO: u64 = 500_000_000;

impl Watches {
    pub fn host_tsc(&self, ns: u64) -> u64 {
        TSC_AT_ZERO + ns * TICKS
    }

    pub fn guest_tsc(&self, ns: u64) -> u64 {
        let host = self.host_tsc(ns);
        let scaled = match self.ratio {
            Some(ratio) => ((u128::from(host) * u128::from(ratio)) >> 48) as u64,
            None => host,
        };
        scaled.wrapping_add(self.offset as u64)
    }

    fn guest_monotonic(&self, ns: u64) -> u64 {
        let own = (ns - GUEST_ZERO) as i128;
        (own + own * i128::from(self.guest_ppm) / 1_000_000) as u64
    }

    fn clocks(&self, last: u64) -> Clocks {
        let ends = [900_000_000, last / 2 + 450_000_000, last];
        let offset = GuestOffset {
            before: self.offset,
            after: self.offset,
            ratio: self.ratio,
            frac_bits: 48,
        };
        Clocks {
            host: ends
                .map(|ns| Pair {
                    tsc: self.host_tsc(ns),
                    monotonic_ns: ns,
                })
                .to_vec(),
            guest: ends
                .map(|ns| Pair {
                    tsc: self.guest_tsc(ns),
                    monotonic_ns: self.guest_monotonic(ns),
                })
                .to_vec(),
            remote: Vec::new(),
            realtime_minus_monotonic_ns: 0,
            guest_offset: self.told.then_some(offset),
        }
    }
}

/// Returns which of an event's arguments are times.
pub fn times(kind: Kind) -> std::ops::Range<usize> {
    match kind {
        Kind::BenchOperation => 0..1,
        Kind::FathomRequest => 0..6,
        _ => 0..0,
    }
}

pub fn with_clock(event: &Event, tick: impl Fn(u64) -> u64) -> Event {
    let mut event = *event;
    event.time = tick(event.time);
    for i in times(event.kind) {
        event.args[i] = tick(event.args[i]);
    }
    event
}

/// The streams of a run, by name.
pub type Files = Vec<(&'static str, Clock, Vec<Event>)>;

pub fn files(streams: Streams, watches: &Watches) -> Files {
    let guest = |events: Vec<Event>| -> Vec<Event> {
        let tick = |ns| watches.guest_tsc(ns);
        events.iter().map(|event| with_clock(event, tick)).collect()
    };
    let host = |events: Vec<Event>| -> Vec<Event> {
        let tick = |ns| watches.host_tsc(ns);
        events.iter().map(|event| with_clock(event, tick)).collect()
    };
    vec![
        ("bench", Clock::GuestTsc, guest(streams.bench)),
        ("guest", Clock::GuestTsc, guest(streams.guest)),
        ("kvm", Clock::HostTsc, host(streams.kvm)),
        ("block", Clock::HostTsc, host(streams.block)),
        ("fathom", Clock::HostTsc, host(streams.fathom)),
    ]
}

pub fn disk(plan: &Plan) -> Disk {
    let queues = 0..plan.queues;
    Disk {
        name: "disk0".into(),
        under_test: true,
        device: "vhost-user-blk".into(),
        server_pid: Some(sim::SERVER_PID),
        kick_eventfds: queues.clone().map(sim::kick_eventfd).collect(),
        doorbells: queues.clone().map(sim::doorbell).collect(),
        msi: queues.clone().map(sim::msi).collect(),
        identified_by: Some("eventfd-id".into()),
        guest_dev: Some(sim::GUEST_DEV),
        guest_name: Some("vda".into()),
        guest_irqs: match plan.vqs {
            true => queues.clone().map(sim::irq).collect(),
            false => Vec::new(),
        },
        guest_vqs: match plan.vqs {
            true => queues.map(sim::vq).collect(),
            false => Vec::new(),
        },
        host: Some(BlockDevice {
            dev: sim::HOST_DEV,
            name: "nvme0n1".into(),
            scheduler: "none".into(),
        }),
        extents: EXTENTS
            .map(|(offset, physical, length)| Extent {
                offset,
                physical,
                length,
            })
            .to_vec(),
        ..Disk::default()
    }
}

pub fn threads(plan: &Plan) -> Vec<Thread> {
    let thread = |pid, tid, role, vcpu| Thread {
        pid,
        tid,
        name: format!("{role:?}"),
        role,
        vcpu,
    };
    let workers = (0..plan.queues).map(|q| thread(sim::SERVER_PID, sim::worker(q), Role::Io, None));
    let vcpus = (0..plan.vcpus).map(|vcpu| {
        let number = Some(u32::from(vcpu));
        thread(sim::QEMU_PID, sim::vcpu_tid(vcpu), Role::Vcpu, number)
    });
    workers.chain(vcpus).collect()
}

/// Returns the run of a plan, with one traced round.
pub fn run(plan: &Plan, watches: &Watches, files: &Files, last: u64) -> Run {
    let bench = files.iter().find(|(name, ..)| *name == "bench");
    let operations = bench.map_or(0, |(_, _, events)| events.len() as u64);
    Run {
        version: VERSION,
        kind: RunKind::Lab,
        title: "simulated".into(),
        created: 1_790_000_000,
        experiment: None,
        scenario: Some(Scenario {
            server: "fathom".into(),
            iodepth: plan.depth as u32,
            ..Scenario::default()
        }),
        environment: Environment::default(),
        disks: vec![disk(plan)],
        threads: threads(plan),
        rounds: vec![Round {
            name: "traced-0".into(),
            traced: ["guest", "kvm", "block", "fathom"]
                .map(String::from)
                .to_vec(),
            benchmark: Some(Benchmark {
                operations,
                mean_ns: 200_000.0,
                ..Benchmark::default()
            }),
            clocks: watches.clocks(last),
            streams: files
                .iter()
                .map(|(name, clock, events)| StreamInfo {
                    name: (*name).into(),
                    clock: *clock,
                    events: events.len() as u64,
                    lost: Some(0),
                })
                .collect(),
            ..Round::default()
        }],
        problems: Vec::new(),
    }
}

/// Writes a run directory with these streams, unchanged.
pub fn write(dir: &Path, run: &Run, files: &Files) {
    let folder = dir.join(&run.rounds[0].name);
    std::fs::create_dir_all(&folder).unwrap();
    for (name, _, events) in files {
        let path = folder.join(format!("{name}.events"));
        let width = events
            .iter()
            .map(|event| {
                event
                    .args
                    .iter()
                    .rposition(|&arg| arg != 0)
                    .map_or(0, |i| i + 1)
            })
            .max()
            .unwrap_or(0);
        let mut writer = StreamWriter::create(&path, width, Vec::new()).unwrap();
        for event in events {
            writer.push(event).unwrap();
        }
        writer.finish().unwrap();
    }
    run.save(dir).unwrap();
}

/// A simulated run, its directory, and the truth about it.
pub struct Simulated {
    pub dir: tempfile::TempDir,
    pub plan: Plan,
    pub watches: Watches,
    pub files: Files,
    pub run: Run,
    pub truths: Vec<Truth>,
    /// The server's calls, which are in no file.
    pub calls: Vec<Event>,
}

impl Simulated {
    pub fn new(plan: Plan, watches: Watches) -> Simulated {
        let (streams, truths) = sim::World::new(plan.clone()).run();
        let mut streams = streams;
        let calls = std::mem::take(&mut streams.calls);
        let last = streams.kvm.last().map_or(2_000_000_000, |event| event.time);
        let files = files(streams, &watches);
        let run = run(&plan, &watches, &files, last + 1_000_000);
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &run, &files);
        Simulated {
            dir,
            plan,
            watches,
            files,
            run,
            truths,
            calls,
        }
    }

    /// Replaces the server's stamps with its calls.
    pub fn with_calls(&mut self) {
        let tick = |ns| self.watches.host_tsc(ns);
        let calls = self.calls.iter();
        let calls: Vec<Event> = calls.map(|event| with_clock(event, tick)).collect();
        let rounds = &mut self.run.rounds[0].streams;
        let fathom = rounds.iter_mut().find(|info| info.name == "fathom");
        let info = fathom.expect("Fathom's records");
        (info.name, info.events) = ("io-calls".into(), calls.len() as u64);
        let file = self.files.iter_mut().find(|file| file.0 == "fathom");
        *file.expect("Fathom's records") = ("io-calls", Clock::HostTsc, calls);
    }

    /// Writes the run again, after its description or its files were changed.
    pub fn rewrite(&self) {
        write(self.dir.path(), &self.run, &self.files);
    }

    pub fn file(&mut self, name: &str) -> &mut Vec<Event> {
        let found = self.files.iter_mut().find(|(known, ..)| *known == name);
        &mut found.unwrap().2
    }

    /// Removes a stream from the run.
    pub fn without(&mut self, name: &str) {
        self.files.retain(|(known, ..)| *known != name);
        self.run.rounds[0].streams.retain(|info| info.name != name);
    }

    pub fn analyse(&self) -> Analysis {
        let options = Options {
            slowest: usize::MAX,
        };
        analyse(self.dir.path(), &options).unwrap()
    }
}

/// Returns all joined requests, by their start.
pub fn joined(exact: &Exact) -> Vec<Joined> {
    let mut all = exact.slowest.clone();
    all.sort_by_key(|joined| (joined.start, joined.offset));
    all
}

/// Returns how a joined request differs from the truth, with times within `error`.
pub fn difference(joined: &Joined, truth: &Truth, error: i64) -> Option<String> {
    let points: Vec<_> = joined
        .points
        .iter()
        .map(|&(point, at)| (point, at + joined.start))
        .collect();
    let same = points.len() == truth.points.len()
        && points
            .iter()
            .zip(&truth.points)
            .all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() <= error);
    if !same {
        return Some(format!(
            "points {points:?}\nbut in truth {:?}",
            truth.points
        ));
    }
    let told = (joined.length, joined.delivery, joined.batch, joined.host);
    let true_ = (truth.length, truth.delivery, truth.batch, truth.host);
    (told != true_).then(|| format!("{told:?} but in truth {true_:?}\n{points:?}"))
}
