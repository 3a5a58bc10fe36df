//! A load in a guest, with all that is seen around it.

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

/// By so much of the load's requests may those of the server differ before its times say nothing of
/// a request of the load's.
const SPLIT: f64 = 0.1;

/// What is to be run in a guest.
pub struct Job<'a> {
    /// For the guest's shell; what it prints is parsed.
    pub script: &'a str,
    pub timeout: Duration,
    pub parse: &'a dyn Fn(&str) -> Result<Worked>,
}

/// What one window has shown.
#[derive(Debug, Default)]
pub struct Seen {
    pub measures: Vec<Measure>,
    pub series: Vec<Series>,
    pub evidence: Evidence,
}

impl GuestBed {
    /// Runs a load in the guest and looks at the guest, at QEMU, the disk's server and the device
    /// below its image meanwhile.
    ///
    /// # Errors
    /// When the script fails, or prints what cannot be parsed.
    pub fn measure(&mut self, job: &Job) -> Result<Seen> {
        let fathom = match self.server.as_ref().and_then(|server| server.api()) {
            Some(path) => Some(Api::connect(path)?),
            None => None,
        };
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

/// What Fathom has counted since its start.
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

/// Fathom polls unless it is told otherwise, and says for how long, of all workers together.
fn note_polling(evidence: &mut Evidence, ns: u64) {
    let threads = evidence.threads.iter_mut();
    let mut workers = threads.filter(|one| one.polls && one.role == ThreadRole::Io);
    if let (Some(worker), None) = (workers.next(), workers.next()) {
        worker.polled = Some(ns as f64 / 1e9);
    }
}
