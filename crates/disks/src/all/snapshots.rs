//! Manages internal snapshots of images.

use super::Objects;
use super::freezing::no_thread;
use crate::activity;
use crate::changes;
use crate::remake::Also;
use crate::snapshots::{Change, SnapshotWork};
use fathom_control::{ErrorKind, RequestError};
use fathom_host::options::DiskOptions;
use fathom_metrics::{SnapshotInfo, Snapshots};
use fathom_requests::{Answer, Responder, SnapshotsOrder};
use std::sync::Arc;

impl Objects {
    /// Lists or changes the internal snapshots of a disk's image.
    pub(super) fn order_snapshots(
        &mut self,
        index: usize,
        order: SnapshotsOrder,
        responder: Responder,
    ) {
        let change = match order {
            SnapshotsOrder::List => None,
            SnapshotsOrder::Take { snapshot } => Some(Change::Take(snapshot)),
            SnapshotsOrder::Delete { snapshot } => Some(Change::Delete(snapshot)),
        };
        let work = change.map(|change| Arc::new(SnapshotWork::new(change)));
        let name = self.disks[index].name().to_owned();
        let begun = match &work {
            None => self.begin_to_list(index),
            Some(work) => self.begin_snapshot_work(index, work.clone()),
        };
        match (begun, work) {
            (Err(error), _) => responder(Err(error)),
            (Ok(()), None) => self
                .activities
                .begin(&name, responder, activity::Change::Plain),
            (Ok(()), Some(work)) => {
                let told = move |answer| responder(outcome(&work, answer));
                self.activities
                    .begin(&name, Box::new(told), activity::Change::Plain);
            }
        }
    }

    fn begin_to_list(&self, index: usize) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(error) = self.activities.busy(name) {
            return Err(error);
        }
        let image = disk.qcow2_image().ok_or_else(|| have_none(name))?;
        let begun = changes::list_snapshots(name.to_owned(), image, self.mail.post());
        begun.map_err(|error| no_thread(&error))
    }

    pub(super) fn on_snapshots_listed(
        &mut self,
        name: &str,
        listed: Result<Vec<SnapshotInfo>, String>,
    ) {
        if let Some((responder, _)) = self.activities.end(name) {
            let failed = |problem| ErrorKind::Failed.because(format!("disk '{name}': {problem}"));
            responder(
                listed
                    .map_err(failed)
                    .map(|snapshots| Snapshots { snapshots }.into()),
            );
        }
    }

    /// Begins to replace the disk by a disk with the same options. In between, the image is closed,
    /// and its snapshots are changed.
    fn begin_snapshot_work(
        &self,
        index: usize,
        work: Arc<SnapshotWork>,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(error) = self.activities.busy(name) {
            return Err(error);
        }
        disk.qcow2_image().ok_or_else(|| have_none(name))?;
        let conflict = |problem| {
            ErrorKind::Conflict.because(format!(
                "disk '{name}': its snapshots cannot be changed while it is served: {problem}"
            ))
        };
        let problem = disk.may_not_have_snapshots();
        problem.map_or(Ok(()), |problem| Err(conflict(problem)))?;
        disk.may_be_left().map_err(conflict)?;
        let options = DiskOptions::of(disk.spec().clone(), self.nbd.is_some()).map_err(conflict)?;
        self.begin_remake(index, options, Also::Snapshots(work), &conflict)
    }
}

fn have_none(name: &str) -> RequestError {
    ErrorKind::Invalid.because(format!(
        "disk '{name}': no internal snapshots, which only qcow2 images without --filter cow have"
    ))
}

/// Returns the reply after the disk has been replaced, or continues as before.
fn outcome(work: &SnapshotWork, remade: Answer) -> Answer {
    match (work.done(), remade) {
        (Some(all), Ok(_)) => {
            let snapshots = all.to_vec();
            Ok(Snapshots { snapshots }.into())
        }
        (Some(_), Err(mut error)) => {
            error.text.push_str(" (the snapshots were changed)");
            Err(error)
        }
        (None, remade) => remade,
    }
}
