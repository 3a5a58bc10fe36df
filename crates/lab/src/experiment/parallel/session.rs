//! Running cells: what is launched, and what is measured of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::{Evidence, Load};
use fathom_run::{Better, Measure, Series, Unit};
use fathom_units::short_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::disks::{Disks, Served};
use super::image::Image;
use super::memory::Memory;
use super::together::{self, Life, Outcome};
use super::{Cell, RATE, Work, inspect, merging};
use crate::bed::{DISK, Seen};
use crate::error::{Context, Error, Result};
use crate::evidence::{self, Kind, Sampler, Watch, Watched};
use crate::experiment::{Session, Settings, Yield};
use crate::guest::Guest;
use crate::machine::Machine;
use crate::scratch::Scratch;

/// An inspection's, for each of those that go on at the same time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of the memory that is available, what may be used where nobody says.
const USABLE: u64 = 80;

pub struct Launching {
    fathom: PathBuf,
    /// Made for the first cell that has disks.
    image: Option<Image>,
    /// By settings.
    alone: BTreeMap<String, Alone>,
}

/// What one appliance takes with nobody beside it.
#[derive(Clone, Copy)]
struct Alone {
    seconds: f64,
    /// Where it could be measured.
    memory: Option<u64>,
}

/// What a launch has shown.
#[derive(Default)]
struct Launched {
    outcome: Outcome,
    evidence: Evidence,
    series: Vec<Series>,
    memory: Option<Sizes>,
    problems: Vec<String>,
}

/// With all appliances up.
struct Sizes {
    qemus: Memory,
    servers: Memory,
    /// When equal pages have been merged.
    merged: Option<Memory>,
}

impl Launching {
    pub fn new(fathom: PathBuf) -> Launching {
        raise_descriptors();
        Launching {
            fathom,
            image: None,
            alone: BTreeMap::new(),
        }
    }

    /// What one takes, measured now if that is not known. The error is a result: why not even one
    /// comes up.
    fn alone(
        &mut self,
        cell: &Cell,
        progress: &mut dyn FnMut(&str),
    ) -> std::result::Result<Alone, String> {
        let one = Cell {
            appliances: 1,
            max_memory: None,
            merge: false,
            ..cell.clone()
        };
        let key = format!("{:?}", one.machine(None, 1)) + one.disks.name() + one.work.name();
        if let Some(known) = self.alone.get(&key) {
            return Ok(*known);
        }
        progress("one appliance alone, and again with all in the page cache");
        let mut launched = Launched::default();
        for _ in 0..2 {
            launched = self.launch(&one, progress)?;
        }
        let Launched {
            outcome, memory, ..
        } = launched;
        let alone = Alone {
            seconds: outcome.closed(),
            memory: memory.map(|sizes| sizes.sum()),
        };
        self.alone.insert(key, alone);
        Ok(alone)
    }

    /// Launches a cell's appliances. The error is a result: the first reason why they are not all up
    /// and closed.
    fn launch(
        &self,
        cell: &Cell,
        progress: &mut dyn FnMut(&str),
    ) -> std::result::Result<Launched, String> {
        let launched = self.try_launch(cell, progress);
        let launched = launched.map_err(|error| together::reason(&error))?;
        let failures = &launched.outcome.failures;
        match failures.first() {
            None => Ok(launched),
            Some(first) => Err(format!(
                "{} of {} failed, the first of them {first}",
                failures.len(),
                cell.appliances
            )),
        }
    }

    fn try_launch(&self, cell: &Cell, progress: &mut dyn FnMut(&str)) -> Result<Launched> {
        let count = cell.appliances;
        let dir = Scratch::small()?;
        let path = self.image.as_ref().map(Image::path).unwrap_or_default();
        let served = cell.disks.serve(count, &self.fathom, dir.path(), &path)?;
        let Served { disks, mut servers } = served;
        let machines = disks.into_iter().map(|disk| cell.machine(disk, count));
        let machines: Vec<Machine> = machines.collect();
        let pids: Vec<u32> = { servers.iter_mut() }
            .map(|server| server.process().pid())
            .collect();
        let sampler = Sampler::start(Watch {
            processes: pids.iter().map(|&pid| server(pid)).collect(),
            // None where it is not known.
            device: evidence::device_below(&path).unwrap_or_default(),
            ..Watch::default()
        })?;
        let life = Life {
            work: &|guest| self.work(cell, guest),
            newcomers: sampler.newcomers(),
        };
        let mut launched = Launched::default();
        launched.outcome = together::run(&machines, &life, |qemus| {
            (launched.evidence, launched.series) = sampler.stop();
            if qemus.len() == count {
                launched.measure_memory(cell, qemus, &pids, progress);
            }
        });
        launched.evidence.load = launched.outcome.load();
        for server in servers {
            server.stop()?;
        }
        Ok(launched)
    }

    /// In an appliance whose guest has booted.
    fn work(&self, cell: &Cell, guest: &mut Guest) -> Result<()> {
        match (cell.work, &self.image) {
            (Work::Inspect, Some(image)) => {
                let count = u32::try_from(cell.appliances).unwrap_or(u32::MAX);
                let device = guest.device(DISK)?;
                let printed = guest.check(&inspect::script(&device), PATIENCE * count)?;
                inspect::check(&printed, &image.contents)
            }
            _ => Ok(()),
        }
    }
}

impl Session for Launching {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        if cell.disks != Disks::None && self.image.is_none() {
            progress("making a disk to inspect");
            self.image = Some(Image::make()?);
        }
        let count = cell.appliances;
        let alone = match self.alone(&cell, progress) {
            Ok(alone) => alone,
            Err(why) => return Ok(failed(count, &format!("not even one comes up: {why}"))),
        };
        if let Some(why) = does_not_fit(&cell, alone.memory)? {
            return Ok(failed(count, &why));
        }
        progress(&format!("launching {count} at once"));
        Ok(match self.launch(&cell, progress) {
            Ok(launched) => launched.told(count, alone.seconds),
            Err(why) => failed(count, &why),
        })
    }
}

fn server(pid: u32) -> Watched {
    Watched {
        polls: true,
        ..Watched::new(pid, Kind::Server)
    }
}

/// The result of a cell whose appliances were not all there.
fn failed(count: usize, why: &str) -> Yield {
    let measure = Measure::new("failed", Unit::Count, count as f64, Better::Lower);
    Yield {
        measures: vec![measure],
        problems: vec![format!("{count} at once: {why}")],
        ..Yield::default()
    }
}

/// Why so many are not tried.
fn does_not_fit(cell: &Cell, each: Option<u64>) -> Result<Option<String>> {
    let (most, whose) = match cell.max_memory {
        Some(most) => (most, "of --max-memory"),
        None => (available()? / 100 * USABLE, "that may be used"),
    };
    // Where it is not known, they are tried.
    let Some(each) = each.filter(|each| each.saturating_mul(cell.appliances as u64) > most) else {
        return Ok(None);
    };
    let mib = |bytes: u64| short_size(bytes >> 20 << 20);
    let (each, most) = (mib(each), mib(most));
    Ok(Some(format!(
        "not started: one takes {each}, and all of them more than the {most} {whose}"
    )))
}

/// Of this machine, bytes.
fn available() -> Result<u64> {
    let path = "/proc/meminfo";
    let text = fs::read_to_string(path).context(|| format!("cannot read {path}"))?;
    let line = { text.lines() }.find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| Error::Protocol(format!("{path} tells no MemAvailable")))?;
    Ok(kib.saturating_mul(1024))
}

impl Outcome {
    /// Seconds from the first start to the last end, but for what was done while all were up.
    fn closed(&self) -> f64 {
        (self.all_up() + self.closing).as_secs_f64()
    }

    fn mean_up(&self) -> f64 {
        let sum: Duration = self.up.iter().sum();
        sum.as_secs_f64() / self.up.len().max(1) as f64
    }

    /// A request is an appliance that comes up.
    fn load(&self) -> Load {
        Load {
            threads: u32::try_from(self.up.len()).unwrap_or(u32::MAX),
            depth: 1,
            requests: self.up.len() as u64,
            mean_ns: self.mean_up() * 1e9,
            ..Load::default()
        }
    }
}

impl Sizes {
    fn sum(&self) -> u64 {
        self.qemus.proportional + self.servers.proportional
    }
}

impl Launched {
    fn measure_memory(
        &mut self,
        cell: &Cell,
        qemus: &[u32],
        servers: &[u32],
        progress: &mut dyn FnMut(&str),
    ) {
        let sizes = || -> Result<Sizes> {
            Ok(Sizes {
                qemus: Memory::of(qemus)?,
                servers: Memory::of(servers)?,
                merged: None,
            })
        };
        let merged = |progress: &mut dyn FnMut(&str)| -> Result<Memory> {
            progress("merging equal pages");
            merging::merge()?;
            Memory::of(qemus)
        };
        match sizes() {
            Ok(sizes) => self.memory = Some(sizes),
            Err(error) => return self.problems.push(together::reason(&error)),
        }
        if !cell.merge || cell.disks.share_memory() {
            return;
        }
        match (merged(progress), &mut self.memory) {
            (Ok(memory), Some(sizes)) => sizes.merged = Some(memory),
            (Err(error), _) => self.problems.push(together::reason(&error)),
            (Ok(_), None) => {}
        }
    }

    fn told(self, count: usize, alone: f64) -> Yield {
        let mut measures = times(&self.outcome, count, alone);
        if let Some(sizes) = &self.memory {
            measures.extend(memory(sizes, count));
        }
        let mut told = Yield::from(Seen {
            measures,
            series: self.series,
            evidence: self.evidence,
        });
        told.problems = self.problems;
        told
    }
}

fn times(outcome: &Outcome, count: usize, alone: f64) -> Vec<Measure> {
    let closed = outcome.closed();
    let efficiency = efficiency(alone, closed, count, cpus());
    let seconds = |name, value, better| Measure::new(name, Unit::Seconds, value, better);
    let each = closed / count as f64;
    vec![
        Measure::new(RATE, Unit::PerSecond, 1.0 / each, Better::Higher),
        Measure::new("efficiency", Unit::Ratio, efficiency, Better::Higher),
        seconds("up", outcome.all_up().as_secs_f64(), Better::Lower),
        seconds("closed", closed, Better::Lower),
        seconds("per-appliance", each, Better::Lower),
        seconds("up.mean", outcome.mean_up(), Better::Lower).of(count as u64),
        seconds("alone", alone, Better::Neither),
    ]
}

/// What so many take together, next to one alone for each of them on the CPUs that they can use.
fn efficiency(alone: f64, together: f64, count: usize, cpus: usize) -> f64 {
    alone * count as f64 / (together * count.min(cpus) as f64)
}

fn memory(sizes: &Sizes, count: usize) -> Vec<Measure> {
    let each = |name, bytes: u64, better| {
        Measure::new(name, Unit::Bytes, bytes as f64 / count as f64, better)
    };
    let mut measures = vec![
        each("memory.each", sizes.sum(), Better::Lower),
        each("memory.qemu", sizes.qemus.proportional, Better::Lower),
        each("memory.shared", sizes.qemus.shared, Better::Neither),
    ];
    if sizes.servers.proportional > 0 {
        let servers = each("memory.servers", sizes.servers.proportional, Better::Lower);
        measures.push(servers);
    }
    if let Some(merged) = sizes.merged {
        let bytes = merged.proportional + sizes.servers.proportional;
        measures.push(each("memory.merged.each", bytes, Better::Lower));
    }
    measures
}

/// That this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Each appliance takes some of this process's descriptors; how many there may be is not what is
/// asked.
fn raise_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    let _ = setrlimit(Resource::Nofile, raised); // fewer appliances fit, which is then said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::parallel::PARAMETERS;

    #[test]
    fn efficiency_is_one_where_each_has_a_cpu_of_its_own_or_all_share_them_well() {
        // One takes 3 s; on two CPUs two do, and eight take four times as long.
        assert_eq!(efficiency(3.0, 3.0, 1, 2), 1.0);
        assert_eq!(efficiency(3.0, 3.0, 2, 2), 1.0);
        assert_eq!(efficiency(3.0, 12.0, 8, 2), 1.0);
        assert_eq!(efficiency(3.0, 24.0, 8, 2), 0.5);
        // Where there are CPUs, taking turns is a waste.
        assert_eq!(efficiency(3.0, 12.0, 4, 16), 0.25);
    }

    #[test]
    fn what_is_done_while_all_are_up_does_not_count() {
        let outcome = Outcome {
            up: [4, 2].map(Duration::from_secs).to_vec(),
            closing: Duration::from_secs(1),
            failures: Vec::new(),
        };
        let measures = times(&outcome, 2, 3.0);
        let value = |name: &str| {
            let found = measures.iter().find(|one| one.name == name);
            found.unwrap().value
        };
        assert_eq!((value("up"), value("closed")), (4.0, 5.0));
        assert_eq!((value("per-appliance"), value(RATE)), (2.5, 0.4));
        assert_eq!(value("up.mean"), 3.0);
        let load = outcome.load();
        assert_eq!((load.threads, load.requests, load.mean_ns), (2, 2, 3e9));
    }

    #[test]
    fn no_more_are_started_than_fit() {
        let cell = |appliances: u64, most: &str| {
            let settings = Settings::defaults(PARAMETERS)
                .with("appliances", appliances)
                .with("max-memory", most);
            Cell::new(&settings).unwrap()
        };
        let fits = |appliances, most, each| {
            let why = does_not_fit(&cell(appliances, most), each).unwrap();
            why.unwrap_or_default()
        };
        let each = Some(100 << 20);
        assert_eq!(fits(2, "200M", each), "");
        assert_eq!(
            fits(3, "200M", each),
            "not started: one takes 100M, and all of them more than the 200M of --max-memory"
        );
        assert_eq!(fits(1000, "1M", None), "");
        assert!(fits(1000, "", Some(1 << 40)).contains("may be used"));
    }

    #[test]
    fn memory_is_told_by_appliances() {
        let of = |proportional, shared| Memory {
            proportional,
            shared,
        };
        let sizes = Sizes {
            qemus: of(400, 60),
            servers: of(20, 8),
            merged: Some(of(200, 300)),
        };
        let told: Vec<(String, f64)> = memory(&sizes, 2)
            .into_iter()
            .map(|one| (one.name, one.value))
            .collect();
        let wanted = [
            ("memory.each", 210.0),
            ("memory.qemu", 200.0),
            ("memory.shared", 30.0),
            ("memory.servers", 10.0),
            ("memory.merged.each", 110.0),
        ];
        assert_eq!(told, wanted.map(|(name, value)| (name.to_owned(), value)));
    }
}
