//! Replaces a disk by one with other options while it is in use.

use super::freezing::no_thread;
use super::{MAX_LEFT, Objects};
use crate::activity::Change;
use crate::changes;
use crate::definitions::definition_of;
use crate::disk::Served;
use crate::nbd::Nbd;
use crate::remake::{Also, Remake};
use fathom_control::{ErrorKind, RequestError};
use fathom_host::options::DiskOptions;
use fathom_host::signals::LeftToThisThread;
use fathom_metrics::Happened;
use fathom_requests::Responder;
use fathom_spec::DiskSpec;
use fathom_storage::{OnSuperseded, PART};

impl Objects {
    /// Replaces a disk by one with these options.
    pub(super) fn remake(&mut self, index: usize, wanted: DiskSpec, responder: Responder) {
        let name = wanted.name.clone();
        match self.begin_to_remake(index, wanted) {
            Ok(()) => self.activities.begin(&name, responder, Change::Plain),
            Err(error) => responder(Err(error)),
        }
    }

    fn begin_to_remake(&self, index: usize, wanted: DiskSpec) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let invalid = |text| ErrorKind::Invalid.because(text);
        let conflict = |problem| {
            let name = disk.name();
            ErrorKind::Conflict.because(format!(
                "disk '{name}': cannot be changed while it is served: {problem}"
            ))
        };
        disk.may_be_left().map_err(conflict)?;
        wanted.check_paths().map_err(invalid)?;
        let options = DiskOptions::of(wanted, self.nbd.is_some());
        let options = options.map_err(invalid)?;
        if let Some(pool) = &options.disk.pool {
            self.common.pools.check(pool).map_err(invalid)?;
        }
        self.begin_remake(index, options, Also::Nothing, &conflict)
    }

    /// Begins to replace a disk.
    pub(super) fn begin_remake(
        &self,
        index: usize,
        mut options: DiskOptions,
        also: Also,
        conflict: &dyn Fn(String) -> RequestError,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        // (A trace continues only if a client starts it again.)
        options.trace = None;
        options.disk.succeeds = true;
        options.disk.known_raw = match also.switch() {
            // A mirror's target was checked before the mirror wrote the guest's data to it.
            Some(_) => true,
            None => disk.is_raw(&options.disk.location),
        };
        options.disk.keys = options.disk.keys.or(disk.keys());
        options.disk.handover_state = disk.early_state().map_err(conflict)?;
        if also.switch().is_some() {
            // (The state of the storage belongs to the old image.)
            options.disk.handover_state.take(PART);
            // The switch itself removes the mark of its image.
            options.disk.superseded = OnSuperseded::Ignore;
        }
        let remake = Remake {
            export: disk.export_shared(),
            clients: self.nbd.as_ref().map(Nbd::server),
            file: disk.file_shared(),
            parts: disk.parts(),
            files: disk.used_files(),
            old: disk.marked(),
            definition: definition_of(disk.name(), self.common.definitions.as_deref()),
            options,
            common: self.common.clone(),
            also,
            before: disk.shared().clone(),
        };
        let begun = remake.begin(self.mail.post());
        begun.map_err(|error| no_thread(&error))
    }

    /// Handles the end of replacing a disk. After an error, the old disk continues as before.
    pub(super) fn on_remade(&mut self, name: &str, remade: Result<Box<Served>, String>) {
        let Some((index, responder, change)) = self.changed(name) else {
            return;
        };
        let next = match change {
            Change::PreparingJob(next, job) => Some((next, job)),
            _ => None,
        };
        match remade {
            Ok(mut disk) => {
                let _signals = LeftToThisThread::begin();
                disk.continue_counts(&self.disks[index].counts(MAX_LEFT));
                disk.succeed(self.disks[index].shared());
                disk.keep_file(&mut self.disks[index]);
                changes::watch_size(&disk, self.mail.post());
                tracing::info!("disk changed: {}", disk.describe());
                if next.is_none() {
                    disk.keep_jobs(&mut self.disks[index]);
                }
                let old = std::mem::replace(&mut self.disks[index], *disk);
                changes::give_up(old);
                let disk = name.to_owned();
                self.common.events.tell(Happened::Changed { disk });
                match next {
                    Some((next, job)) => self.go_on(index, next, job, responder),
                    None => responder(Ok(self.shown(index, false))),
                }
            }
            Err(problem) => {
                self.disks[index].set_unsettled(problem.clone());
                tracing::warn!("disk '{name}': not changed: {problem}");
                let text = format!("disk '{name}': not changed: {problem}");
                responder(Err(ErrorKind::Failed.because(text)));
            }
        }
    }
}
