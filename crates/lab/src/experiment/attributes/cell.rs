//! One technology, attribute by attribute.

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

/// As fio's figures have it.
const P99: &str = "latency.p99";
const SHORT: Duration = Duration::from_secs(120);
/// For the time that an instance which wants a CPU is looked at: many periods of a limit.
const LOOK: Duration = Duration::from_secs(3);
/// That instances share.
const CPU: usize = 0;

pub struct Cell {
    /// The technology's, with reads of 4 KiB one at a time.
    latency: technologies::Cell,
    /// The same with 128 KiB in order.
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

    /// What can be said before anything runs.
    ///
    /// # Errors
    /// When values do not go together, or do not work on this machine.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Protocol(why.into()));
        if self.cap >= 1.0 {
            return refuse(
                "--cap: an instance has one CPU, so the limit is less than one CPU: 0.2",
            );
        }
        control_groups::need_controller("cpu")?;
        match &self.latency.place {
            Place::Path(path) if path.is_dir() => self.latency.check(),
            _ => refuse("--place: a directory, in which two disks' files are made"),
        }
    }

    pub fn technology(&self) -> technologies::Technology {
        self.latency.technology
    }

    /// How its reads are made, and its instances.
    pub fn latency(&self) -> &technologies::Cell {
        &self.latency
    }

    /// All attributes, on the first disk; the other one is the neighbour's.
    ///
    /// # Errors
    /// Everything that can go wrong with instances, servers, fio and limits.
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

    /// An instance without programs that does nothing: what it takes.
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

    /// Reads with nobody beside it: those of 4 KiB, and what follows from them and from others.
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

    /// The same reads of 4 KiB beside an instance that reads, too.
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

    /// The same beside one that is on the same CPU and does not pause.
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

    /// What it takes of a CPU that it wants all of, and is to have a part of. It is of no use
    /// afterwards.
    fn capped(&self, mut own: Instance) -> Result<[Measure; 2]> {
        own.check(SPIN, SHORT)?;
        let group = Limited::new(Limit::Cpus(self.cap))?;
        group.take(own.processes())?;
        let (begin, before) = (Instant::now(), own.cpu_seconds());
        std::thread::sleep(LOOK);
        let took = (own.cpu_seconds() - before) / begin.elapsed().as_secs_f64();
        drop(own); // the group goes after its processes
        let percent =
            |name: &str, part| Measure::new(name, Unit::Percent, part * 100.0, Better::Neither);
        Ok([percent("cap.set", self.cap), percent("cap.got", took)])
    }
}

/// As the experiment `technologies` has it, with one thread and one request in flight.
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

/// Of its CPU and its memory.
fn speed(own: &mut Instance) -> Result<[Measure; 2]> {
    let script = format!("{} guest probe", own.program());
    let (sort, read) = probe::parse(&own.check(&script, SHORT)?)?;
    let ns = |name: &str, value| Measure::new(name, Unit::Nanoseconds, value, Better::Lower);
    Ok([ns("cpu", sort), ns("memory-access", read)])
}

/// The 99th percentile beside a neighbour, and how many times that of reads alone it is.
fn compared(who: &str, seen: &Seen, alone: &Seen) -> Vec<Measure> {
    // Of too few reads it cannot be told.
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
