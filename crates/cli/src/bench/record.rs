//! `fathom bench --output RUN`: adds the result as a cell to a run directory, for `fathom report`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use fathom_lab::environment;
use fathom_lab::work::{Worked, bench, latencies, rates};
use fathom_load::report::Direction;
use fathom_load::{Report, files};
use fathom_run::evidence::Evidence;
use fathom_run::{Better, Cell, Experiment, Measure, Run, RunKind, Unit, now};
use fathom_units::short_size;

use crate::lab::wrapped;

const NAME: &str = "bench";

/// The settings and measurements of a load.
pub struct Record {
    settings: BTreeMap<String, String>,
    measures: Vec<Measure>,
    evidence: Evidence,
    seconds: f64,
}

/// Fails if no cell can be added to `dir`. Called before the measurement, to save the user's time.
pub fn check(dir: &Path) -> anyhow::Result<()> {
    load(dir).map(drop)
}

/// Adds a cell to a run directory, which is created if necessary.
fn add(dir: &Path, record: Record) -> anyhow::Result<()> {
    let shown = dir.display();
    fs::create_dir_all(dir).with_context(|| format!("cannot create {shown}"))?;
    // The lock makes other writers wait until the directory has both the cell and its plan.
    let lock = File::open(dir).with_context(|| format!("cannot open {shown}"))?;
    lock.lock()
        .with_context(|| format!("cannot lock {shown}"))?;
    let mut run = load(dir)?.unwrap_or_else(new_run);
    let Some(experiment) = &mut run.experiment else {
        bail!("{shown} is not a run of fathom bench");
    };
    let planned = experiment.add(record.settings).clone();
    let cell = Cell {
        planned,
        started: now(),
        seconds: record.seconds,
        measures: record.measures,
        evidence: Some(record.evidence),
        ..Cell::default()
    };
    // The cell is saved before the plan. The next run overwrites a cell that no plan names, but a
    // planned cell without a file would be reported as missing.
    cell.save(dir)?;
    run.save(dir)?;
    eprintln!("bench: added to {shown}: fathom report {shown}");
    Ok(())
}

/// Loads the run in `dir`, or returns `None` if the directory is empty or missing.
fn load(dir: &Path) -> anyhow::Result<Option<Run>> {
    let shown = dir.display();
    let is_empty = match fs::read_dir(dir) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
    };
    if is_empty {
        return Ok(None);
    }
    let run = Run::load(dir)?;
    match &run.experiment {
        Some(experiment) if experiment.name == NAME => Ok(Some(run)),
        _ => bail!("{shown} is a run of another command; choose another --output"),
    }
}

fn new_run() -> Run {
    Run {
        experiment: Some(Experiment {
            name: NAME.into(),
            ..Experiment::default()
        }),
        environment: environment::here(""),
        ..Run::new(
            RunKind::Experiment,
            "bench: what a server, a file or a file system can do",
        )
    }
}

impl Record {
    fn new<const N: usize>(
        settings: [(&str, String); N],
        measures: Vec<Measure>,
        evidence: Evidence,
    ) -> Record {
        let settings = settings.map(|(name, value)| (name.to_owned(), value));
        Record {
            settings: settings.into(),
            measures,
            seconds: evidence.seconds,
            evidence,
        }
    }

    /// Adds the result to the run directory, if one is given.
    pub fn keep(self, dir: Option<&Path>) -> anyhow::Result<()> {
        dir.map_or(Ok(()), |dir| add(dir, self))
    }

    /// Prints the sentence that begins a result for people: the limiter and the rate. A load
    /// without requests, such as one that only verifies, has none.
    pub fn answer(&self, json: bool) -> std::io::Result<()> {
        match json || self.evidence.load.requests == 0 {
            true => Ok(()),
            false => {
                let answer = wrapped(&bench::answer(&self.evidence));
                writeln!(std::io::stdout(), "{answer}")
            }
        }
    }

    /// Returns the record of a load on a server or a file.
    pub fn of(report: &Report) -> Record {
        let settings = [
            ("target", report.target.clone()),
            ("engine", report.engine.clone()),
            ("wait", report.wait.clone()),
            ("rw", report.rw.clone()),
            ("bs", short_size(report.bs.into())),
            ("iodepth", report.iodepth.to_string()),
            ("queues", report.queues.to_string()),
        ];
        let requests: u64 = report.operations.iter().map(|one| one.ios).sum();
        let mut measures = rates(report.iops, report.mb_per_s, requests);
        for one in &report.operations {
            let Direction {
                op, ios, latency, ..
            } = one;
            // With one operation, its name is not needed as a prefix.
            let prefix = match report.operations.len() {
                1 => String::new(),
                _ => format!("{op}."),
            };
            measures.extend(latencies(&prefix, latency, *ios));
        }
        let server = report.backend.as_ref();
        measures.extend(server.map(|one| cpu("server", one.cpu_us_per_request, requests)));
        measures.push(cpu("load", report.client_cpu_us_per_request, requests));
        for (name, value) in [
            ("kicks", report.kicks_per_request),
            ("calls", report.calls_per_request),
        ] {
            measures.push(Measure::new(name, Unit::PerRequest, value, Better::Lower).of(requests));
        }
        if report.errors > 0 {
            let errors = report.errors as f64;
            measures.push(Measure::new("errors", Unit::Count, errors, Better::Lower));
        }
        Record::new(settings, measures, bench::evidence(report))
    }

    /// Returns the record of a load on a file system.
    pub fn of_files(report: &files::Report) -> Record {
        let direct = if report.direct { "on" } else { "off" };
        let settings = [
            ("target", report.directory.display().to_string()),
            ("workload", report.workload.clone()),
            ("bs", short_size(report.bs.into())),
            ("threads", report.threads.to_string()),
            ("direct", direct.to_owned()),
            ("files", report.files.to_string()),
            ("dirs", report.dirs.to_string()),
        ];
        let Worked { mut measures, load } = Worked::of_files(report);
        measures.push(cpu("load", report.client_cpu_us_per_request, load.requests));
        if let Some(sync) = report.sync {
            measures.push(Measure::new("sync", Unit::Seconds, sync, Better::Lower));
        }
        Record::new(settings, measures, bench::evidence_of_files(report))
    }
}

/// Returns the CPU time per request of the server or the load generator.
fn cpu(whose: &str, microseconds: f64, requests: u64) -> Measure {
    let (name, unit) = (format!("cpu.{whose}"), Unit::CpuMicrosecondsPerRequest);
    Measure::new(name, unit, microseconds, Better::Lower).of(requests)
}
