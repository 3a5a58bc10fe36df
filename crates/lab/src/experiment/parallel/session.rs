//! Runs cells: launches appliances and measures them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::Evidence;
use fathom_run::{Better, Measure, Series, Unit};
use fathom_units::short_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::disks::{Disks, Served};
use super::figures::Sizes;
use super::image::Image;
use super::together::{self, Life, Outcome};
use super::{Cell, Work, figures, inspect, merging};
use crate::bed::{DISK, Seen};
use crate::error::{Error, Result};
use crate::evidence::{self, Kind, Sampler, Watch, Watched};
use crate::experiment::memory::Memory;
use crate::experiment::{Session, Settings, Yield};
use crate::guest::Guest;
use crate::host;
use crate::machine::Machine;
use crate::scratch::{self, Scratch};

/// Time limit of an inspection, for each of those that run at the same time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Percentage of the available memory that may be used by default.
const USABLE: u64 = 80;

pub struct Launching {
    fathom: PathBuf,
    /// The image, from the first cell with disks on.
    image: Option<Image>,
    /// Results by settings.
    alone: BTreeMap<String, Alone>,
}

/// Time and memory of one appliance alone.
#[derive(Clone, Copy)]
struct Alone {
    seconds: f64,
    /// `None` if the memory could not be measured.
    memory: Option<u64>,
}

/// Results of a launch.
#[derive(Default)]
struct Launched {
    outcome: Outcome,
    evidence: Evidence,
    series: Vec<Series>,
    memory: Option<Sizes>,
    problems: Vec<String>,
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

    /// Returns the figures of one appliance alone, and measures them if necessary.
    ///
    /// An error is a result: the reason why not even one appliance starts.
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

    /// Launches a cell's appliances.
    ///
    /// An error is a result: the first reason why not all appliances came up and closed.
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
        let image = { self.image.as_ref() }.filter(|_| cell.disks != Disks::None);
        let path = image.map(Image::path).unwrap_or_default();
        let served = cell.disks.serve(count, &self.fathom, dir.path(), &path)?;
        let Served { disks, mut servers } = served;
        let machines = disks.into_iter().map(|disk| cell.machine(disk, count));
        let machines: Vec<Machine> = machines.collect();
        let pids: Vec<u32> = { servers.iter_mut() }
            .map(|server| server.process().pid())
            .collect();
        let sampler = Sampler::start(Watch {
            processes: pids.iter().map(|&pid| server(pid)).collect(),
            // `None` if the device is not known.
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

    /// Does the cell's work in an appliance whose guest has booted.
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
            Err(why) => return failed(count, &format!("a single machine does not start: {why}")),
        };
        if let Some(why) = does_not_fit(&cell, alone.memory)? {
            return failed(count, &why);
        }
        progress(&format!("launching {count} at once"));
        match self.launch(&cell, progress) {
            Ok(launched) => Ok(launched.told(count, alone.seconds)),
            Err(why) => failed(count, &why),
        }
    }
}

fn server(pid: u32) -> Watched {
    Watched {
        polls: true,
        ..Watched::new(pid, Kind::Server)
    }
}

/// Returns the result of a cell whose appliances did not all come up and close.
///
/// # Errors
/// If a signal ended the appliances: that is no result, and the cell must be run again.
fn failed(count: usize, why: &str) -> Result<Yield> {
    if scratch::is_ending() {
        return Err(Error::Protocol(why.to_owned()));
    }
    let measure = Measure::new("failed", Unit::Count, count as f64, Better::Lower);
    Ok(Yield {
        measures: vec![measure],
        problems: vec![format!("{count} at once: {why}")],
        ..Yield::default()
    })
}

/// Returns why the appliances do not fit into memory, or `None`.
///
/// `each` is the memory of one appliance. If that is unknown, its guest's memory is used.
fn does_not_fit(cell: &Cell, each: Option<u64>) -> Result<Option<String>> {
    let (most, whose) = match cell.max_memory {
        Some(most) => (most, "of --max-memory"),
        None => (host::available_memory()? / 100 * USABLE, "that may be used"),
    };
    let each = each.unwrap_or(cell.memory);
    if each.saturating_mul(cell.appliances as u64) <= most {
        return Ok(None);
    }
    let mib = |bytes: u64| short_size(bytes >> 20 << 20);
    let (each, most) = (mib(each), mib(most));
    Ok(Some(format!(
        "not started: one takes {each}, and all of them more than the {most} {whose}"
    )))
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
        let mut measures = figures::times(&self.outcome, count, alone);
        if let Some(sizes) = &self.memory {
            measures.extend(figures::memory(sizes, count));
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

/// Raises the limit of open files to its maximum. Each appliance needs some descriptors, and the
/// limit is not to be measured.
fn raise_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    let _ = setrlimit(Resource::Nofile, raised); // without it, fewer appliances fit
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::parallel::PARAMETERS;

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
        // Not measured: the guest's memory is used.
        assert_eq!(fits(2, "512M", None), "");
        assert!(fits(3, "512M", None).contains("one takes 256M"));
        assert!(fits(1000, "", Some(1 << 40)).contains("may be used"));
    }
}
