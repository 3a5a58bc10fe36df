//! Manages dirty bitmaps.

use super::Objects;
use super::freezing::no_thread;
use crate::activity::Change;
use crate::changes;
use fathom_control::{ErrorKind, RequestError};
use fathom_metrics::{BitmapInfo, Bitmaps};
use fathom_requests::{BitmapOrder, Responder};

impl Objects {
    /// Lists or changes a disk's dirty bitmaps.
    pub(super) fn order_bitmaps(&mut self, index: usize, order: BitmapOrder, responder: Responder) {
        if let Some(error) = self.may_not_be_ordered(index, &order) {
            return responder(Err(error));
        }
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        match changes::order_bitmaps(disk, order, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, responder, Change::Plain),
            Err(error) => responder(Err(no_thread(&error))),
        }
    }

    fn may_not_be_ordered(&self, index: usize, order: &BitmapOrder) -> Option<RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(error) = self.activities.busy(name) {
            return Some(error);
        }
        let is_read = disk.backup().is_some_and(|backup| !backup.is_over());
        (is_read && *order != BitmapOrder::List).then(|| {
            ErrorKind::Conflict.because(format!(
                "disk '{name}': a backup is in progress; end it first"
            ))
        })
    }

    pub(super) fn on_bitmaps_done(&mut self, name: &str, done: Result<Vec<BitmapInfo>, String>) {
        let Some((responder, _)) = self.activities.end(name) else {
            return;
        };
        responder(match done {
            Ok(bitmaps) => Ok(Bitmaps { bitmaps }.into()),
            Err(problem) => Err(ErrorKind::Failed.because(format!("disk '{name}': {problem}"))),
        });
    }
}
