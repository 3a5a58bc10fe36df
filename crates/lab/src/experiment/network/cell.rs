//! A cell: one test between two sides.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use fathom_run::evidence::{Evidence, Load};
use fathom_run::{Better, Measure, Unit};

use super::iperf3::{self, Report, Test};
use super::side::{PATIENCE, Pair, SHORT, Side};
use super::{Net, Technology};
use crate::bed::Seen;
use crate::bed::instance::container;
use crate::error::{Error, Result};
use crate::evidence::guest::{self, Counted};
use crate::evidence::{Kind, Newcomers, Sampler, Watch, Watched};
use crate::experiment::shared::Cpus;
use crate::experiment::{Settings, Yield};
use crate::process_tree;

/// Default memory of a machine, in bytes.
const MEMORY: u64 = 256 << 20;
const MIB: u64 = 1 << 20;

pub struct Cell {
    pub technology: Technology,
    pub net: Net,
    test: Test,
    threads: u64,
    pub runtime: Duration,
    memory: Option<u64>,
    cpus: Option<Cpus>,
    /// Whether the guests have perf.
    pub profiler: bool,
}

/// Results of a test.
struct Outcome {
    report: Report,
    /// CPU time of the sender and the receiver on this machine, in seconds.
    cpu: [f64; 2],
}

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let given = |name: &str| !settings.text(name).is_empty();
        Ok(Cell {
            technology: match given("technology") {
                true => settings.word("technology")?,
                false => Technology::machine(),
            },
            net: settings.word("net")?,
            test: settings.word("test")?,
            threads: Settings::needed("threads", settings.count("threads")?)?,
            runtime: Settings::needed("runtime", settings.time("runtime")?)?,
            memory: settings.size("memory")?,
            cpus: given("cpus").then(|| settings.word("cpus")).transpose()?,
            profiler: false,
        })
    }

    /// Adds perf to the guests.
    #[must_use]
    pub fn with_profiler(mut self) -> Cell {
        self.profiler = true;
        self
    }

    /// Checks the values before anything is started.
    ///
    /// # Errors
    /// If values do not go together, or a limit cannot be set on this machine.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Protocol(why.into()));
        let is_guest = self.technology.accelerator().is_some();
        let Cpus(cpus) = self.cpus.unwrap_or(Cpus(1.0));
        if !is_guest && self.net != Net::Tap {
            let (technology, net) = (self.technology, self.net);
            return refuse(&format!(
                "--net {net} is for guests, and not for {technology}"
            ));
        }
        if is_guest && (cpus.fract() != 0.0 || cpus > 64.0) {
            return refuse("a guest has 1 to 64 whole CPUs: --cpus 1");
        }
        if !self.memory.unwrap_or(MEMORY).is_multiple_of(MIB) {
            return refuse("--memory: not a whole number of MiB");
        }
        match self.technology {
            Technology::Container => container::check(&self.container(&[])),
            _ => Ok(()),
        }
    }

    pub fn container<'a>(&self, programs: &'a [PathBuf]) -> container::Spec<'a> {
        container::Spec {
            disk: None,
            memory: self.memory,
            cpus: self.cpus.map(|Cpus(cpus)| cpus),
            programs,
            shares_network: true,
        }
    }

    pub fn vcpus(&self) -> u32 {
        self.cpus.map_or(1, |Cpus(cpus)| cpus as u32)
    }

    pub fn memory_mib(&self) -> u32 {
        u32::try_from(self.memory.unwrap_or(MEMORY) / MIB).unwrap_or(u32::MAX)
    }

    /// Runs the test between two new sides.
    pub fn run(&self, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        progress(&format!("starting two sides ({})", self.technology));
        let mut pair = Pair::start(self)?;
        progress(&format!("{} ({})", self.test, self.technology));
        let seen = self.measure(&mut pair)?;
        pair.end()?;
        Ok(Yield::from(seen))
    }

    fn measure(&self, pair: &mut Pair) -> Result<Seen> {
        pair.receiver.check(&iperf3::listen(), SHORT)?;
        let before = [count(&mut pair.sender)?, count(&mut pair.receiver)?];
        let processes = [pair.sender.watched(), pair.receiver.watched()].concat();
        let sampler = Sampler::start(Watch {
            processes,
            ..Watch::default()
        })?;
        let sent = self.send(pair, sampler.newcomers());
        let (mut evidence, series) = sampler.stop();
        let outcome = sent?;
        let after = [count(&mut pair.sender)?, count(&mut pair.receiver)?];
        let counted = [0, 1].map(|side| guest::between(&before[side], &after[side]));
        evidence.load = self.load(&outcome.report);
        note(&mut evidence, counted, pair);
        Ok(Seen {
            measures: self.measures(&outcome),
            series,
            evidence,
        })
    }

    fn send(&self, pair: &mut Pair, newcomers: Newcomers) -> Result<Outcome> {
        let cpu = |pair: &Pair| {
            [&pair.sender, &pair.receiver]
                .map(Side::pid)
                .map(process_tree::cpu_seconds)
        };
        let before = cpu(pair);
        let script = self.test.send(pair.address, self.threads, self.runtime);
        let is_guest = pair.sender.is_guest();
        let sender = pair.sender.pid();
        let printed = thread::scope(|scope| {
            if !is_guest {
                scope.spawn(move || watch_sender(sender, &newcomers));
            }
            pair.sender.check(&script, self.runtime + PATIENCE)
        })?;
        let after = cpu(pair);
        Ok(Outcome {
            report: iperf3::parse(&printed, self.test)?,
            cpu: [0, 1].map(|side| after[side] - before[side]),
        })
    }

    fn load(&self, report: &Report) -> Load {
        Load {
            threads: u32::try_from(self.threads).unwrap_or(u32::MAX),
            requests: self.requests(report),
            bytes: report.bytes,
            seconds: report.seconds,
            // The time of a write is not known: a write ends when the data is in the socket's
            // buffer.
            ..Load::default()
        }
    }

    /// Returns the number of writes or packets that were received.
    fn requests(&self, report: &Report) -> u64 {
        report.bytes / self.test.size()
    }

    fn measures(&self, outcome: &Outcome) -> Vec<Measure> {
        let Outcome { report, cpu } = outcome;
        let lower = |name: &str, unit, value| Measure::new(name, unit, value, Better::Lower);
        let higher = |name: &str, unit, value| Measure::new(name, unit, value, Better::Higher);
        let (requests, bytes) = (self.requests(report), report.bytes as f64);
        let ([sender, receiver], each) = (*cpu, requests.max(1) as f64);
        match self.test {
            Test::Throughput => {
                let (unit, gigabytes) = (Unit::Seconds, bytes / 1e9);
                vec![
                    higher(
                        "throughput",
                        Unit::MegabytesPerSecond,
                        bytes / report.seconds / 1e6,
                    ),
                    lower("retransmits", Unit::Count, report.retransmits as f64),
                    lower("sender.cpu-per-gb", unit, sender / gigabytes),
                    lower("receiver.cpu-per-gb", unit, receiver / gigabytes),
                ]
            }
            Test::Packets => {
                let unit = Unit::CpuMicrosecondsPerRequest;
                let loss = report.lost as f64 * 100.0 / report.packets.max(1) as f64;
                vec![
                    higher("packets", Unit::PerSecond, each / report.seconds),
                    lower("loss", Unit::Percent, loss),
                    lower("sender.cpu-per-packet", unit, sender * 1e6 / each),
                    lower("receiver.cpu-per-packet", unit, receiver * 1e6 / each),
                ]
            }
        }
    }
}

/// Returns a guest's counters. Other sides have no counters of their own.
fn count(side: &mut Side) -> Result<String> {
    match side.is_guest() {
        true => side.check(&guest::print(), SHORT),
        false => Ok(String::new()),
    }
}

/// Reports iperf3 below the process `side` once it has started: its threads are the load.
fn watch_sender(side: u32, newcomers: &Newcomers) {
    const ATTEMPTS: u32 = 50;
    const POLL: Duration = Duration::from_millis(20);
    for _ in 0..ATTEMPTS {
        let found = process_tree::named(side, "iperf3");
        for pid in &found {
            newcomers.watch(Watched::new(*pid, Kind::Load));
        }
        if !found.is_empty() {
            return;
        }
        thread::sleep(POLL);
    }
}

/// Adds the guests' counters. The CPUs of the receiver follow those of the sender.
fn note(evidence: &mut Evidence, counted: [Counted; 2], pair: &Pair) {
    let [sender, receiver] = counted;
    let first = sender.processors.as_ref().map_or(0, |cpus| cpus.busy.len());
    let threads = evidence.threads.iter_mut();
    for thread in threads.filter(|one| one.pid == pair.receiver.pid()) {
        thread.vcpu = thread.vcpu.map(|number| number + first as u32);
    }
    let sum = |one: Option<u64>, other: Option<u64>| match (one, other) {
        (None, None) => None,
        _ => Some(one.unwrap_or(0) + other.unwrap_or(0)),
    };
    let interrupts = sum(sender.interrupts, receiver.interrupts);
    let kicks = sum(sender.kicks, receiver.kicks);
    if interrupts.is_some() || kicks.is_some() {
        let crossings = evidence.crossings.get_or_insert_default();
        (crossings.interrupts, crossings.kicks) = (interrupts, kicks);
    }
    let both = [sender.processors, receiver.processors]
        .into_iter()
        .flatten();
    evidence.guest = both.reduce(|mut all, more| {
        all.busy.extend(more.busy);
        all.steal.extend(more.steal);
        all
    });
}
