//! Disks' dirty bitmaps.

use super::Objects;
use super::freezing::no_thread;
use crate::objects::activity::Change;
use crate::objects::changes;
use crate::orders::BitmapOrder;
use crate::reply::Asker;
use fathom_control::{ErrorKind, RequestError};
use fathom_metrics::{BitmapInfo, Bitmaps};

impl Objects {
    /// See to a disk's bitmaps.
    pub(super) fn order_bitmaps(&mut self, index: usize, order: BitmapOrder, asker: Asker) {
        if let Some(refusal) = self.may_not_be_ordered(index, &order) {
            return asker(Err(refusal));
        }
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        match changes::order_bitmaps(disk, order, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, asker, Change::Plain),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    fn may_not_be_ordered(&self, index: usize, order: &BitmapOrder) -> Option<RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.activities.busy(name) {
            return Some(refusal);
        }
        let is_read = disk.backup().is_some_and(|backup| !backup.is_over());
        (is_read && *order != BitmapOrder::List).then(|| {
            ErrorKind::Conflict.because(format!(
                "disk '{name}': a backup is in progress; end it first"
            ))
        })
    }

    pub(super) fn take_in_bitmaps(&mut self, name: &str, done: Result<Vec<BitmapInfo>, String>) {
        let Some((asker, _)) = self.activities.end(name) else {
            return;
        };
        asker(match done {
            Ok(bitmaps) => Ok(Bitmaps { bitmaps }.into()),
            Err(problem) => Err(ErrorKind::Failed.because(format!("disk '{name}': {problem}"))),
        });
    }
}
