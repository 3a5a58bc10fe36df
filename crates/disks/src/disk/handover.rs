//! A disk that goes from one process to another.

use super::{Served, TRACE};
use crate::inherited::Inherited;
use crate::shared_disk::SharedDisk;
use fathom_core::{Legacy, Parts, WorkerHandle};
use fathom_exports::vhost_user::Arrival;
use fathom_files::{UsedFile, check_same};
use fathom_host::Error;
use fathom_host::handover::{DiskState, GivenDisk};
use fathom_metrics::DiskCounts;
use fathom_trace::StageHistograms;
use fathom_units::cause;
use std::time::Instant;

impl Served {
    /// Why another process could not go on with it; one line for the user.
    pub fn may_be_handed_over(&self) -> Result<(), String> {
        let name = self.name();
        self.may_be_left()
            .map_err(|problem| format!("disk '{name}': cannot be handed over: {problem}"))
    }

    /// Why another one in its place would be another disk.
    pub fn may_be_left(&self) -> Result<(), String> {
        match self.job_of_others() {
            Some(job) => Err(job.to_owned()),
            None => self.may_be_switched(),
        }
    }

    /// Likewise, with another image.
    pub fn may_be_switched(&self) -> Result<(), String> {
        let problem = match self.stack.parts.may_go().err() {
            Some(problem) => problem,
            None if self.options.disk.inject.is_some() => {
                "--inject cannot be handed over to another process".to_owned()
            }
            None if self
                .stack
                .file
                .as_ref()
                .is_some_and(|file| file.flush_has_failed()) =>
            {
                "a flush failed, which another process would not know".to_owned()
            }
            None => return Ok(()),
        };
        Err(problem)
    }

    /// What it is, for a successor, and its export, which stands still from now on.
    pub fn give(&self) -> Result<GivenDisk, String> {
        let export = self
            .vhost_user
            .as_ref()
            .map(|serving| serving.export().freeze());
        let named = |problem| format!("disk '{}': cannot be handed over: {problem}", self.name());
        let state = DiskState {
            table: self.spec().clone(),
            export: None,
            files: 0,
            lent: Default::default(),
            used: self.used_files(),
        };
        Ok(GivenDisk {
            state,
            export: export.transpose().map_err(named)?,
            lent: self.lend().map_err(named)?,
        })
    }

    /// The files that it has open.
    pub fn used_files(&self) -> Vec<UsedFile> {
        self.stack.used_files()
    }

    /// Fails if it has opened other files than its predecessor has open. The error is for the user.
    pub fn check_files(&self, before: &[UsedFile]) -> Result<(), String> {
        let checked = check_same(before, &self.used_files(), 0);
        checked.map_err(|problem| format!("disk '{}': {problem}", self.name()))
    }

    /// What its parts are open for, in this place and in another one.
    pub fn lend(&self) -> Result<Legacy, String> {
        let legacy = self.stack.parts.lend()?;
        if let Some(trace) = &self.trace {
            let failed = |error| format!("cannot hand over its trace: {}", cause(error));
            legacy.put(TRACE, trace.lend().map_err(failed)?);
        }
        Ok(legacy)
    }

    pub fn parts(&self) -> Parts {
        self.stack.parts.clone()
    }

    /// Nothing is in flight: how its parts are.
    pub fn leave(&self) -> Result<Legacy, String> {
        self.stack.parts.leave()
    }

    /// This one takes the place of one that is used so.
    pub fn succeed(&self, before: &SharedDisk) {
        self.shared.succeed(before);
    }

    /// Its parts go on from there.
    pub fn take_left(&mut self, left: &Legacy) -> Result<(), String> {
        if let Some(trace) = &mut self.trace {
            trace.begin(&self.stack.workers);
        }
        let taken = self.stack.parts.inherit(left);
        taken.map_err(|problem| format!("disk '{}': {problem}", self.name()))
    }

    /// Another process goes on with it.
    pub fn leave_for_good(&self, deadline: Instant) {
        self.stack.parts.end(deadline);
    }

    /// Have the kernel write what it has of the disk's file, while requests go on.
    pub fn flush_early(&self) {
        if let Some(file) = self
            .stack
            .file
            .as_ref()
            .filter(|_| self.vhost_user.is_some())
        {
            file.flush_early();
        }
    }

    /// Become the predecessor's: serve front-ends from where it stops.
    pub fn take(&mut self, arrival: Option<Arrival>) -> Result<(), Error> {
        match arrival {
            Some(arrival) => self.serve_by(move |export| export.serve_on(arrival)),
            None => Ok(()),
        }
    }

    /// What was counted, by this process and those before it, with so many of the slowest requests.
    pub fn counts(&self, slow: usize) -> DiskCounts {
        let workers = self.stack.workers.iter();
        let own = workers.clone().map(WorkerHandle::histograms);
        let histograms = own.chain(self.inherited.histograms());
        DiskCounts {
            histograms: histograms.map(StageHistograms::state).collect(),
            workers: self.workers_info(),
            refused: self.refused(),
            seconds: self.seconds(),
            slow: self.slow(slow),
        }
    }

    /// Count on from there.
    pub fn inherit(&mut self, counts: &DiskCounts) {
        self.inherited = Inherited::of(counts);
        self.alarms.restart();
    }
}
