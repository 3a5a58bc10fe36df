//! A cell: all attributes of one technology.

use std::path::Path;
use std::time::{Duration, Instant};

use fathom_run::{Better, Measure, Unit};

use super::look;
use super::neighbour::{Neighbour, SPIN};
use crate::bed::instance::{Instance, Kind, Spec};
use crate::bed::{Job, Seen};
use crate::control_groups::{self, Limit, Limited};
use crate::error::{Error, Result};
use crate::experiment::memory::Memory;
use crate::experiment::place::Place;
use crate::experiment::shared::Cpus;
use crate::experiment::{Settings, Yield, probe, technologies};
use crate::page_cache;
use crate::work::{AROUND_FIO, Worked};

/// The name of the measure in fio's results.
const P99: &str = "latency.p99";
const SHORT: Duration = Duration::from_secs(120);
/// Time for which a busy instance is observed: many periods of its CPU limit.
const LOOK: Duration = Duration::from_secs(3);
/// The CPU that the instances share.
const CPU: usize = 0;

pub struct Cell {
    /// The technology's cell with random reads of 4 KiB, one at a time.
    latency: technologies::Cell,
    /// The technology's cell with sequential reads of 128 KiB.
    throughput: technologies::Cell,
    pub runtime: Duration,
    cap: f64,
    reads: u64,
    memory: u64,
}

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let Cpus(cap) = settings.word("cap")?;
        Ok(Cell {
            latency: technology(settings, "iops")?,
            throughput: technology(settings, "throughput")?,
            runtime: Settings::needed("runtime", settings.time("runtime")?)?,
            cap,
            reads: Settings::needed("reads", settings.count("reads")?)?,
            memory: Settings::needed("memory", settings.size("memory")?)?,
        })
    }

    /// Checks the values before anything is run.
    ///
    /// # Errors
    /// If values do not go together, or do not work on this machine.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Protocol(why.into()));
        if self.cap >= 1.0 {
            return refuse(
                "--cap: an instance has one CPU, so the limit is less than one CPU: 0.2",
            );
        }
        control_groups::need_controller("cpu")?;
        match &self.latency.place {
            Place::Path(path) if path.is_dir() => {
                self.latency.check()?;
                let both = self.latency.size.saturating_mul(2);
                self.latency.place.find()?.check_room(both)
            }
            _ => refuse("--place: a directory, in which two disks' files are made"),
        }
    }

    pub fn technology(&self) -> technologies::Technology {
        self.latency.technology
    }

    /// Returns the cell with reads of 4 KiB, which also describes the instances.
    pub fn latency(&self) -> &technologies::Cell {
        &self.latency
    }

    /// Measures all attributes, on the first disk. The second disk is the neighbour's.
    ///
    /// # Errors
    /// Any failure of instances, servers, fio and limits.
    pub fn run(
        &self,
        fathom: &Path,
        [disk, other]: [&Path; 2],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let name = self.technology();
        let spec = Spec {
            program: Some(fathom),
            ..self.latency.spec(fathom, disk)
        };
        progress(&format!("starting {name}"));
        let mut measures = self.idle(fathom, disk)?;
        let mut own = Instance::start(name.kind(), &spec)?;
        measures.extend(speed(&mut own)?);
        progress(&format!("reading in {name}"));
        let (alone, more) = self.alone(&mut own, disk)?;
        measures.extend(more);
        measures.extend(renamed(P99, "p99.alone", &alone));
        measures.extend(self.on_the_disk(&mut own, &alone, fathom, other, progress)?);
        progress("reading with a neighbour on the same CPU");
        measures.extend(self.on_its_cpu(&mut own, fathom, other)?);
        measures.extend(look::measures(name.kind(), &mut own)?);
        progress(&format!("limiting {name} to {} CPUs", self.cap));
        measures.extend(self.capped(own)?);
        Ok(Yield {
            measures,
            series: alone.series,
            evidence: Some(alone.evidence),
            ..Yield::default()
        })
    }

    /// Returns the start-up time and the memory of an idle instance without programs.
    fn idle(&self, fathom: &Path, disk: &Path) -> Result<Vec<Measure>> {
        let kind = self.technology().kind();
        let spec = Spec {
            tools: false,
            ..self.latency.spec(fathom, disk)
        };
        let begin = Instant::now();
        let mut idle = Instance::start(kind, &spec)?;
        idle.check("true", SHORT)?;
        let took = begin.elapsed().as_secs_f64();
        let bytes = |name: &str, value| Measure::new(name, Unit::Bytes, value, Better::Neither);
        let taken = Memory::of(&idle.started())?.proportional;
        let mut measures = vec![
            Measure::new("start-up", Unit::Seconds, took, Better::Lower),
            bytes("memory", taken as f64),
        ];
        if matches!(kind, Kind::Kvm | Kind::Tcg | Kind::Uml) {
            let kept = look::kept_by_kernel(&mut idle, self.memory)?;
            measures.push(bytes("memory.kernel", kept));
        }
        idle.end()?;
        Ok(measures)
    }

    /// Reads without a neighbour. Returns the results of the 4 KiB reads, and measures of all
    /// reads.
    fn alone(&self, own: &mut Instance, disk: &Path) -> Result<(Seen, Vec<Measure>)> {
        page_cache::forget(disk)?;
        let throughput = read(&self.throughput, own)?;
        page_cache::forget(disk)?;
        let latency = read(&self.latency, own)?;
        let figures = [
            ("latency.mean", "io.latency", &latency),
            ("throughput", "io.throughput", &throughput),
        ];
        let figures = figures
            .iter()
            .flat_map(|(of, name, seen)| renamed(of, name, seen));
        let figures = figures.collect();
        Ok((latency, figures))
    }

    /// Reads 4 KiB blocks next to a neighbour that reads from the same storage, with and without
    /// limit.
    fn on_the_disk(
        &self,
        own: &mut Instance,
        alone: &Seen,
        fathom: &Path,
        disk: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Vec<Measure>> {
        let mut measures = Vec::new();
        for (who, limit) in [("disk", None), ("disk-limited", Some(self.reads))] {
            if limit.is_some() && !self.latency.is_fathom() && !control_groups::can_limit_reads() {
                continue;
            }
            progress(&format!("reading with a neighbour ({who})"));
            let _neighbour = Neighbour::on_disk(self, fathom, disk, limit)?;
            measures.extend(compared(who, &read(&self.latency, own)?, alone));
        }
        Ok(measures)
    }

    /// Reads 4 KiB blocks next to a busy neighbour on the same CPU, with and without limit.
    fn on_its_cpu(&self, own: &mut Instance, fathom: &Path, disk: &Path) -> Result<Vec<Measure>> {
        own.pin(CPU)?;
        let alone = read(&self.latency, own)?;
        let mut neighbour = Neighbour::on_cpu(self, fathom, disk, CPU)?;
        let mut measures = compared("cpu", &read(&self.latency, own)?, &alone);
        neighbour.limit(self.cap)?;
        measures.extend(compared("cpu-limited", &read(&self.latency, own)?, &alone));
        measures.extend(renamed(P99, "p99.pinned", &alone));
        Ok(measures)
    }

    /// Measures the CPU time of a busy instance with a CPU limit. The instance is ended.
    fn capped(&self, mut own: Instance) -> Result<[Measure; 2]> {
        own.check(SPIN, SHORT)?;
        let group = Limited::new(Limit::Cpus(self.cap))?;
        group.take(own.processes())?;
        let (begin, before) = (Instant::now(), own.cpu_seconds());
        std::thread::sleep(LOOK);
        let took = (own.cpu_seconds() - before) / begin.elapsed().as_secs_f64();
        drop(own); // processes end before their group is removed
        let percent =
            |name: &str, part| Measure::new(name, Unit::Percent, part * 100.0, Better::Neither);
        Ok([percent("cap.set", self.cap), percent("cap.got", took)])
    }
}

/// Returns a cell of the experiment `technologies`, with one thread and one request in flight.
fn technology(settings: &Settings, test: &str) -> Result<technologies::Cell> {
    let mut all = Settings::defaults(technologies::PARAMETERS)
        .with("threads", 1)
        .with("op", "read")
        .with("test", test);
    for name in ["technology", "runtime", "place", "size", "memory"] {
        all = all.with(name, settings.text(name));
    }
    technologies::Cell::new(&all)
}

fn read(cell: &technologies::Cell, own: &mut Instance) -> Result<Seen> {
    own.measure(&Job {
        script: &cell.job.script(own.disk()),
        timeout: cell.job.runtime + AROUND_FIO,
        parse: &|text| Worked::of_fio(text, cell.job.shape()),
    })
}

/// Returns the speed of the instance's CPU and memory.
fn speed(own: &mut Instance) -> Result<[Measure; 2]> {
    let script = format!("{} guest probe", own.program());
    let (sort, read) = probe::parse(&own.check(&script, SHORT)?)?;
    let ns = |name: &str, value| Measure::new(name, Unit::Nanoseconds, value, Better::Lower);
    Ok([ns("cpu", sort), ns("memory-access", read)])
}

/// Returns the 99th percentile next to a neighbour, and its ratio to that of reads alone.
fn compared(who: &str, seen: &Seen, alone: &Seen) -> Vec<Measure> {
    // A percentile needs enough reads.
    let Some(p99) = renamed(P99, &format!("p99.{who}"), seen) else {
        return Vec::new();
    };
    let times = renamed(P99, "", alone).map(|alone| {
        let (name, times) = (format!("neighbour.{who}"), p99.value / alone.value);
        Measure::new(name, Unit::Ratio, times, Better::Neither)
    });
    std::iter::once(p99).chain(times).collect()
}

fn renamed(of: &str, name: &str, seen: &Seen) -> Option<Measure> {
    let found = seen.measures.iter().find(|one| one.name == of)?.clone();
    Some(Measure {
        name: name.to_owned(),
        ..found
    })
}
