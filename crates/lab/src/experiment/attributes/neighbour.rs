//! A neighbour: a second instance of the same technology, with a heavy load.

use std::path::Path;
use std::time::Duration;

use super::Cell;
use crate::bed::instance::Instance;
use crate::control_groups::{Limit, Limited};
use crate::error::Result;
use crate::evidence;
use crate::work::{Engine, FioJob};
use crate::workload::Rw;

const SHORT: Duration = Duration::from_secs(120);
/// Seconds until fio works, also in an emulated machine.
const STARTING: u32 = 3;
/// Longer than any measurement.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// A neighbour, which is killed on drop.
pub struct Neighbour {
    // Fields are dropped in order: the processes before their control group.
    instance: Instance,
    limit: Option<Limited>,
}

impl Neighbour {
    /// Starts a neighbour that reads from the disk as fast as possible, or `limit` times per
    /// second.
    ///
    /// # Errors
    /// If the neighbour does not start, or cannot be limited.
    pub fn on_disk(
        cell: &Cell,
        fathom: &Path,
        disk: &Path,
        limit: Option<u64>,
    ) -> Result<Neighbour> {
        let mut spec = cell.latency().spec(fathom, disk);
        let mut group = None;
        match limit {
            Some(reads) if cell.latency().is_fathom() => {
                spec.options
                    .push(format!("--filter=throttle:iops-total={reads}"));
            }
            Some(reads) => {
                let limit = Limit::Reads {
                    device: evidence::device_numbers(disk)?,
                    per_second: reads,
                };
                group = Some(Limited::new(limit)?);
            }
            None => {}
        }
        let mut instance = Instance::start(cell.technology().kind(), &spec)?;
        if let Some(group) = &group {
            group.take(instance.processes())?;
        }
        let load = load(cell)
            .arguments(instance.disk(), true, FOREVER)
            .join(" ");
        let script = format!("(fio {load} >/dev/null 2>&1 &)\nsleep {STARTING}");
        instance.check(&script, SHORT)?;
        Ok(Neighbour {
            instance,
            limit: group,
        })
    }

    /// Starts a neighbour that is always busy, on the CPU `cpu`.
    ///
    /// # Errors
    /// If the neighbour does not start.
    pub fn on_cpu(cell: &Cell, fathom: &Path, disk: &Path, cpu: usize) -> Result<Neighbour> {
        let spec = cell.latency().spec(fathom, disk);
        let mut instance = Instance::start(cell.technology().kind(), &spec)?;
        instance.pin(cpu)?;
        instance.check(SPIN, SHORT)?;
        Ok(Neighbour {
            instance,
            limit: None,
        })
    }

    /// Limits the neighbour's CPU time to a number of CPUs.
    ///
    /// # Errors
    /// If the limit cannot be set.
    pub fn limit(&mut self, cpus: f64) -> Result<()> {
        let group = Limited::new(Limit::Cpus(cpus))?;
        group.take(self.instance.processes())?;
        self.limit = Some(group);
        Ok(())
    }
}

/// Script that starts a busy loop, which runs until the instance ends.
pub const SPIN: &str = "(sh -c 'while :; do :; done' >/dev/null 2>&1 &)";

fn load(cell: &Cell) -> FioJob {
    FioJob {
        rw: Rw::RandRead,
        bs: 64 << 10,
        threads: 8,
        depth: 1,
        engine: Engine::Libaio,
        size: None,
        ..cell.latency().job.clone()
    }
}
