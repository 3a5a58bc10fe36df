//! A cell: fio in one technology.

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::{Bare, Evidence};
use fathom_run::{Better, Measure, Unit};

use super::Technology;
use crate::bed::Job;
use crate::bed::instance::{Cache, Instance, Kind, Spec};
use crate::error::{Error, Result};
use crate::experiment::place::{Found, Place};
use crate::experiment::shared::Cpus;
use crate::experiment::{Settings, Yield};
use crate::machine::Aio;
use crate::page_cache;
use crate::words::words;
use crate::work::{AROUND_FIO, Engine, FioJob, Worked};
use crate::workload::Rw;

const MIB: u64 = 1 << 20;
/// Percentage of cached reads above which a cell reports a problem. Smaller shares can result from
/// other I/O on the same device.
const CACHED: f64 = 10.0;

words! {
    /// Size and order of requests.
    pub enum Test {
        /// Sequential requests of 128 KiB.
        Throughput = "throughput",
        /// Random requests of 4 KiB.
        Iops = "iops",
    }
}

words! {
    /// Operation of requests.
    pub enum Op {
        Read = "read",
        Write = "write",
    }
}

pub struct Cell {
    pub technology: Technology,
    pub job: FioJob,
    pub place: Place,
    pub size: u64,
    pub may_overwrite: bool,
    memory: u64,
    cpus: Cpus,
    aio: Aio,
    /// Options of `fathom serve`.
    options: Vec<String>,
}

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let size = Settings::needed("size", settings.size("size")?)?;
        Ok(Cell {
            technology: match settings.text("technology") {
                "" => Technology::Bare,
                _ => settings.word("technology")?,
            },
            job: job(settings, size)?,
            place: settings.word("place")?,
            size,
            may_overwrite: settings.is_on("overwrite"),
            memory: Settings::needed("memory", settings.size("memory")?)?,
            cpus: settings.word("cpus")?,
            aio: settings.word("aio")?,
            options: settings.list("serve"),
        })
    }

    /// Checks the values before anything is run.
    ///
    /// # Errors
    /// If values do not go together, or do not work on this machine.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::Protocol(why));
        let (Cpus(cpus), kind) = (self.cpus, self.technology.kind());
        let is_guest = matches!(kind, Kind::Kvm | Kind::Tcg);
        if is_guest && (cpus.fract() != 0.0 || cpus > 64.0) {
            return refuse("a virtual machine has 1 to 64 whole CPUs: --cpus 1".into());
        }
        if !self.memory.is_multiple_of(MIB) {
            return refuse("--memory: not a whole number of MiB".into());
        }
        if !self.options.is_empty() && !self.is_fathom() {
            let technology = self.technology;
            return refuse(format!(
                "--serve is for Fathom's disks: not with technology {technology}"
            ));
        }
        if self.size / u64::from(self.job.threads) < self.job.bs {
            return refuse("a part of the disk for each thread: choose a larger --size".into());
        }
        let found = self.place.find()?;
        if let Found::Export(_) = found {
            return refuse("--place: no NBD export: a container cannot have it".into());
        }
        found.refuse_data(self.may_overwrite)?;
        found.check_room(self.size)?;
        kind.check(&self.spec(Path::new(""), Path::new("")))
    }

    pub fn is_fathom(&self) -> bool {
        self.technology.server() == crate::server::Kind::Fathom
    }

    pub fn spec<'a>(&self, fathom: &'a Path, image: &'a Path) -> Spec<'a> {
        let kind = self.technology.kind();
        let Cpus(cpus) = self.cpus;
        Spec {
            as_file: self.technology != Technology::ContainerDevice,
            cache: Cache::None,
            memory: (kind != Kind::Bare).then_some(self.memory),
            cpus: (kind == Kind::Container).then_some(cpus),
            vcpus: cpus as u32,
            tools: true,
            server: self.technology.server(),
            aio: self.aio,
            fathom,
            options: self.options.clone(),
            ..Spec::new(image)
        }
    }

    /// Runs the cell in an instance of its own, and then on the host.
    ///
    /// # Errors
    /// Any failure of instances, servers and fio, with their last output.
    pub fn run(
        &self,
        fathom: &Path,
        image: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        progress(&format!("starting {}", self.technology));
        let mut instance = Instance::start(self.technology.kind(), &self.spec(fathom, image))?;
        page_cache::forget(image)?;
        progress(&format!("{} in {}", self.job.label(), self.technology));
        let before = instance.cpu_seconds();
        let mut seen = instance.measure(&Job {
            script: &self.job.script(instance.disk()),
            timeout: self.job.runtime + AROUND_FIO,
            parse: &|text| Worked::of_fio(text, self.job.shape()),
        })?;
        let cpu = instance.cpu_seconds() - before;
        instance.end()?;
        seen.measures.extend(self.measures(&seen.evidence, cpu));
        let mut found = Yield::from(seen);
        found.problems.extend(self.tell_cached(&found.measures));
        let bare = match (self.technology, &found.evidence) {
            (Technology::Bare, Some(evidence)) => bare(evidence),
            _ => {
                progress("the same on the host");
                self.job.on_host(image)?
            }
        };
        found.compare(bare);
        Ok(found)
    }

    fn measures(&self, evidence: &Evidence, cpu: f64) -> Vec<Measure> {
        let requests = evidence.load.requests;
        let each = cpu * 1e6 / requests.max(1) as f64;
        let unit = Unit::CpuMicrosecondsPerRequest;
        let mut measures = vec![Measure::new("cpu", unit, each, Better::Lower).of(requests)];
        if let (Some(device), Rw::Read | Rw::RandRead) = (&evidence.device, self.job.rw) {
            let from_device = device.bytes as f64 / evidence.load.bytes.max(1) as f64;
            let cached = (1.0 - from_device).max(0.0) * 100.0;
            measures.push(Measure::new(
                "cached",
                Unit::Percent,
                cached,
                Better::Neither,
            ));
        }
        measures
    }

    /// Returns a warning if many reads were not served by the device.
    fn tell_cached(&self, measures: &[Measure]) -> Option<String> {
        let cached = measures.iter().find(|one| one.name == "cached")?.value;
        (cached > CACHED).then(|| {
            format!(
                "{}: {cached:.0}% of what fio read came from a page cache and not from the device, \
                 so it says little of the disk",
                self.technology
            )
        })
    }
}

/// Converts the results of a cell that ran on the host itself.
fn bare(evidence: &Evidence) -> Bare {
    let load = evidence.load.clone();
    let measures = Vec::new();
    Worked { measures, load }.bare()
}

fn job(settings: &Settings, size: u64) -> Result<FioJob> {
    let (test, op) = (settings.word("test")?, settings.word("op")?);
    let (rw, bs) = match (test, op) {
        (Test::Throughput, Op::Read) => (Rw::Read, 128 << 10),
        (Test::Throughput, Op::Write) => (Rw::Write, 128 << 10),
        (Test::Iops, Op::Read) => (Rw::RandRead, 4 << 10),
        (Test::Iops, Op::Write) => (Rw::RandWrite, 4 << 10),
    };
    let runtime: Option<Duration> = settings.time("runtime")?;
    Ok(FioJob {
        rw,
        bs,
        threads: Settings::needed("threads", settings.count("threads")?)?,
        depth: Settings::needed("iodepth", settings.count("iodepth")?)?,
        engine: Engine::Libaio,
        direct: true,
        fsync: 0,
        size: Some(size),
        runtime: Settings::needed("runtime", runtime)?,
    })
}
