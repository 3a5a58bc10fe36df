//! A disk that goes from one process to another.

use super::Served;
use crate::error::Error;
use crate::handover::{DiskCounts, DiskState, WorkerCounts};
use crate::info::WorkerInfo;
use crate::objects::inherited::Inherited;
use fathom_core::WorkerHandle;
use fathom_exports::vhost_user::{Arrival, Frozen};
use fathom_trace::StageHistograms;

/// Filters whose options are all that matters of them: what others have beside these would be lost.
const BY_OPTIONS: [&str; 5] = ["delay", "pause", "readahead", "readonly", "throttle"];

impl Served {
    /// Why another process could not go on with it; one line for the user.
    pub fn may_be_handed_over(&self) -> Result<(), String> {
        let name = self.name();
        self.is_all_in_files()
            .map_err(|problem| format!("disk '{name}' cannot be handed over: {problem}"))
    }

    /// Why another one in its place would be another disk.
    pub fn is_all_in_files(&self) -> Result<(), String> {
        let name = self.name();
        let location = self.options.disk.location.to_string();
        let filters = self.stack.filters.info();
        let stays = filters
            .iter()
            .find(|filter| !BY_OPTIONS.contains(&filter.name.as_str()));
        let problem = match stays {
            Some(filter) => format!("what its filter '{}' has kept would be lost", filter.name),
            None if location.starts_with("memory:") => {
                "it is in this server's memory only".to_owned()
            }
            None if self.options.disk.inject.is_some() => "--inject is not handed over".to_owned(),
            None if self
                .stack
                .file
                .as_ref()
                .is_some_and(|file| file.flush_has_failed()) =>
            {
                "a flush of it has failed, which another process would not know".to_owned()
            }
            None if self.trace.is_some() => {
                format!("it is being traced: end that first (fathom trace {name} --off)")
            }
            None if self.options.table.is_none() => "its options are not known".to_owned(),
            None => return Ok(()),
        };
        Err(problem)
    }

    /// What it is, for a successor, and its export, which stands still from now on.
    pub fn give(&self) -> Result<(DiskState, Option<Frozen>), String> {
        let table = self.options.table.as_deref().cloned();
        let export = self
            .vhost_user
            .as_ref()
            .map(|serving| serving.export().freeze());
        let named = |problem| format!("disk '{}' cannot be handed over: {problem}", self.name());
        let state = DiskState {
            table: table.ok_or_else(|| named("its options are not known".to_owned()))?,
            export: None,
            files: 0,
        };
        Ok((state, export.transpose().map_err(named)?))
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

    /// What was counted, by this process and those before it.
    pub fn counts(&self) -> DiskCounts {
        let workers = self.stack.workers.iter();
        let own = workers.clone().map(WorkerHandle::histograms);
        let histograms = own.chain(self.inherited.histograms());
        let info = self.info();
        let count = |worker: &WorkerInfo| WorkerCounts {
            requests: worker.requests,
            notifications: worker.notifications,
            sleeps: worker.sleeps,
            polled_ns: worker.polled_ns,
        };
        DiskCounts {
            histograms: histograms.map(StageHistograms::state).collect(),
            workers: info.workers.iter().map(count).collect(),
            refused: self.summary().refused,
        }
    }

    /// Count on from there.
    pub fn inherit(&mut self, counts: &DiskCounts) {
        self.inherited = Inherited::of(counts);
    }
}
