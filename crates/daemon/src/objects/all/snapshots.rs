//! Internal snapshots of disks' images.

use super::Objects;
use super::freezing::no_thread;
use crate::objects::activity;
use crate::objects::changes;
use crate::objects::remake::Also;
use crate::objects::snapshots::{Change, SnapshotWork};
use crate::options::DiskOptions;
use crate::orders::SnapshotsOrder;
use crate::reply::{Answer, Asker};
use fathom_control::{ErrorKind, RequestError};
use fathom_metrics::{SnapshotInfo, Snapshots};
use std::sync::Arc;

impl Objects {
    /// See to them.
    pub(super) fn order_snapshots(&mut self, index: usize, order: SnapshotsOrder, asker: Asker) {
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
            (Err(refusal), _) => asker(Err(refusal)),
            (Ok(()), None) => self.activities.begin(&name, asker, activity::Change::Plain),
            (Ok(()), Some(work)) => {
                let told = move |answer| asker(outcome(&work, answer));
                self.activities
                    .begin(&name, Box::new(told), activity::Change::Plain);
            }
        }
    }

    fn begin_to_list(&self, index: usize) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.activities.busy(name) {
            return Err(refusal);
        }
        let image = disk.qcow2_image().ok_or_else(|| have_none(name))?;
        let begun = changes::list_snapshots(name.to_owned(), image, self.mail.post());
        begun.map_err(|error| no_thread(&error))
    }

    pub(super) fn take_in_snapshots(
        &mut self,
        name: &str,
        listed: Result<Vec<SnapshotInfo>, String>,
    ) {
        if let Some((asker, _)) = self.activities.end(name) {
            let failed = |problem| ErrorKind::Failed.because(format!("disk '{name}': {problem}"));
            asker(
                listed
                    .map_err(failed)
                    .map(|snapshots| Snapshots { snapshots }.into()),
            );
        }
    }

    /// The same disk takes its place, and in between the image is nobody's.
    fn begin_snapshot_work(
        &self,
        index: usize,
        work: Arc<SnapshotWork>,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.activities.busy(name) {
            return Err(refusal);
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

/// The disk goes on, or as before.
fn outcome(work: &SnapshotWork, remade: Answer) -> Answer {
    match (work.done(), remade) {
        (Some(all), Ok(_)) => {
            let snapshots = all.to_vec();
            Ok(Snapshots { snapshots }.into())
        }
        (Some(_), Err(mut refusal)) => {
            refusal.text.push_str(" (the snapshots were changed)");
            Err(refusal)
        }
        (None, remade) => remade,
    }
}
