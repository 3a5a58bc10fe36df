//! Replaces a disk by a successor, in this process or in another one.

use super::{Served, TRACE};
use crate::inherited::Inherited;
use crate::shared_disk::SharedDisk;
use fathom_core::{HandoverState, Parts, WorkerHandle};
use fathom_exports::vhost_user::Arrival;
use fathom_files::{UsedFile, check_same};
use fathom_host::Error;
use fathom_host::handover::{DiskState, GivenDisk};
use fathom_metrics::DiskCounts;
use fathom_trace::StageHistograms;
use fathom_units::cause;
use std::time::Instant;

impl Served {
    /// Fails if another process could not continue to serve the disk. The error is one line for the
    /// user.
    pub fn may_be_handed_over(&self) -> Result<(), String> {
        let name = self.name();
        let stays = self.options.fuse.as_ref().map(|fuse| {
            let file = fuse.file.display();
            format!("it is mounted as {file} (--fuse), and a mount cannot move; remove it first")
        });
        stays
            .map_or_else(|| self.may_be_left(), Err)
            .map_err(|problem| format!("disk '{name}': cannot be handed over: {problem}"))
    }

    /// Fails if no other disk with the same image can replace this one: a job is in progress, or
    /// state would be lost.
    pub fn may_be_left(&self) -> Result<(), String> {
        match self.job_of_others() {
            Some(job) => Err(job.to_owned()),
            None => self.may_be_switched(),
        }
    }

    /// Fails if no other disk can replace this one, not even with another image: state would be
    /// lost.
    pub fn may_be_switched(&self) -> Result<(), String> {
        let problem = match self.stack.parts.check_handover().err() {
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

    /// Returns the disk's state for a successor, and the frozen export, which reads no further
    /// messages of the front-end.
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
            lent: self.early_state().map_err(named)?,
        })
    }

    /// Returns the files that the disk has open.
    pub fn used_files(&self) -> Vec<UsedFile> {
        self.stack.used_files()
    }

    /// Fails if the disk has opened other files than its predecessor has open. The error is for the
    /// user.
    pub fn check_files(&self, before: &[UsedFile]) -> Result<(), String> {
        let checked = check_same(before, &self.used_files(), 0);
        checked.map_err(|problem| format!("disk '{}': {problem}", self.name()))
    }

    /// Returns the state that the disk's parts share with a successor's parts while both disks are
    /// open.
    pub fn early_state(&self) -> Result<HandoverState, String> {
        let handover_state = self.stack.parts.early_state()?;
        if let Some(trace) = &self.trace {
            let failed = |error| format!("cannot hand over its trace: {}", cause(error));
            handover_state.put(TRACE, trace.early_state().map_err(failed)?);
        }
        Ok(handover_state)
    }

    pub fn parts(&self) -> Parts {
        self.stack.parts.clone()
    }

    /// Returns the last state of the disk's parts. No requests are in flight.
    pub fn final_state(&self) -> Result<HandoverState, String> {
        self.stack.parts.final_state()
    }

    /// Notes that this disk replaces `before`.
    pub fn succeed(&self, before: &SharedDisk) {
        self.shared.succeed(before);
    }

    /// Gives the disk's parts the last state of the predecessor's parts, and continues the trace.
    pub fn restore(&mut self, left: &HandoverState) -> Result<(), String> {
        if let Some(trace) = &mut self.trace {
            trace.begin(&self.stack.workers);
        }
        let taken = self.stack.parts.restore(left);
        taken.map_err(|problem| format!("disk '{}': {problem}", self.name()))
    }

    /// Does the remaining work of the disk's parts until `deadline`. Another process serves the
    /// disk.
    pub fn leave_for_good(&self, deadline: Instant) {
        self.stack.parts.end(deadline);
    }

    /// Flushes the file of a disk with a front-end's export, while requests continue.
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

    /// Serves front-ends, from the state in which the predecessor has stopped.
    pub fn take(&mut self, arrival: Option<Arrival>) -> Result<(), Error> {
        match arrival {
            Some(arrival) => self.serve_by(move |export| export.serve_on(arrival)),
            None => Ok(()),
        }
    }

    /// Returns the disk's counters, including those of predecessors, with at most `slow` of the
    /// slowest requests.
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

    /// Continues the predecessor's counters.
    pub fn continue_counts(&mut self, counts: &DiskCounts) {
        self.inherited = Inherited::of(counts);
        self.alarms.restart();
    }
}
