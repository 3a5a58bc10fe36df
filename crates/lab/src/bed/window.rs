//! Runs a load in a guest and collects evidence about it.

use std::time::Duration;

use fathom_run::evidence::{Evidence, ThreadRole};
use fathom_run::{Measure, Series};

use super::GuestBed;
use super::stages::Stages;
use crate::error::Result;
use crate::evidence::Sampler;
use crate::evidence::guest::{self, Counted};
use crate::tracers::fathom::Api;
use crate::work::Worked;

/// Maximum difference between the numbers of requests of the server and of the load, as a fraction
/// of the latter. Beyond it, the server's times do not describe the load's requests.
const SPLIT: f64 = 0.1;

/// Work for a guest.
pub struct Job<'a> {
    /// Script for the guest's shell. `parse` interprets the output.
    pub script: &'a str,
    pub timeout: Duration,
    pub parse: &'a dyn Fn(&str) -> Result<Worked>,
}

/// Results of one window.
#[derive(Debug, Default)]
pub struct Seen {
    pub measures: Vec<Measure>,
    pub series: Vec<Series>,
    pub evidence: Evidence,
}

impl GuestBed {
    /// Runs a load in the guest. Meanwhile samples the guest, QEMU, the disk's server and the
    /// device below its image.
    ///
    /// # Errors
    /// When the script fails, or its output cannot be parsed.
    pub fn measure(&mut self, job: &Job) -> Result<Seen> {
        let fathom = self.api()?;
        let before = fathom.as_ref().map(Counts::read).transpose()?;
        let sampler = Sampler::start(self.watch())?;
        let worked = self.work(job);
        let (mut evidence, series) = sampler.stop();
        let (Worked { mut measures, load }, counted) = worked?;
        if let (Some(fathom), Some(before)) = (&fathom, before) {
            let after = Counts::read(fathom)?;
            note_polling(&mut evidence, after.polled.saturating_sub(before.polled));
            let stages = after.stages.since(&before.stages);
            measures.extend(stages.measures());
            evidence
                .filters
                .extend(stages.held(&fathom.info()?.filters()));
            let requests = load.requests as f64;
            if (stages.requests() as f64 - requests).abs() <= SPLIT * requests {
                evidence.layers = stages.layers(load.mean_ns);
            }
        }
        (evidence.load, evidence.guest) = (load, counted.processors);
        if counted.interrupts.is_some() || counted.kicks.is_some() {
            let crossings = evidence.crossings.get_or_insert_default();
            (crossings.interrupts, crossings.kicks) = (counted.interrupts, counted.kicks);
        }
        Ok(Seen {
            measures,
            series,
            evidence,
        })
    }

    fn work(&mut self, job: &Job) -> Result<(Worked, Counted)> {
        let printed = self.guest.check(&guest::around(job.script), job.timeout)?;
        let (text, counted) = guest::split(&printed);
        Ok(((job.parse)(&text)?, counted))
    }
}

/// Fathom's counters since its start.
struct Counts {
    stages: Stages,
    polled: u64,
}

impl Counts {
    fn read(fathom: &Api) -> Result<Counts> {
        Ok(Counts {
            stages: Stages::of(&fathom.stats()?),
            polled: fathom.info()?.polled_ns(),
        })
    }
}

/// Records how long the worker has polled. Fathom polls by default, and reports the total time of
/// all workers, so the time is recorded only for a single worker.
fn note_polling(evidence: &mut Evidence, ns: u64) {
    let threads = evidence.threads.iter_mut();
    let mut workers = threads.filter(|one| one.polls && one.role == ThreadRole::Io);
    if let (Some(worker), None) = (workers.next(), workers.next()) {
        worker.polled = Some(ns as f64 / 1e9);
    }
}
