//! Disks that get other sizes.

use super::Objects;
use crate::objects::activity::Change;
use crate::objects::changes;
use crate::reply::{Asker, Size};
use fathom_control::{ErrorKind, RequestError};
use fathom_core::DiskError;
use fathom_units::cause;

impl Objects {
    pub(super) fn resize(&mut self, index: usize, size: Option<u64>, shrink: bool, asker: Asker) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        if let Some(refusal) = self.is_on_its_way(&name) {
            return asker(Err(refusal));
        }
        if let Err(error) = changes::resize(disk, size, shrink, self.mail.post()) {
            let text = format!("cannot start a thread: {}", cause(error));
            return asker(Err(ErrorKind::Failed.because(text)));
        }
        self.activities.begin(&name, asker, Change::Plain);
    }

    /// Take in what others may have done to sizes, of disks with which nothing else is done.
    pub(super) fn take_in_sizes(&mut self) {
        let noted = self.activities.new_sizes();
        let noted = noted.filter(|name| self.is_on_its_way(name).is_none());
        let noted: Vec<_> = noted.cloned().collect();
        for name in noted {
            self.activities.forget_size(&name);
            if let Some(index) = self.disks.iter().position(|disk| disk.name() == name) {
                // (What has failed is told there.)
                self.resize(index, None, false, Box::new(drop));
            }
        }
    }

    /// Why nothing can be done with a disk that would disturb its move.
    pub(super) fn is_on_its_way(&self, name: &str) -> Option<RequestError> {
        let disk = self.disks.iter().find(|disk| disk.name() == name);
        let problem = disk.and_then(|disk| disk.may_not_be_disturbed());
        let refusal =
            problem.map(|problem| ErrorKind::Conflict.because(format!("disk '{name}': {problem}")));
        self.activities.busy(name).or(refusal)
    }

    pub(super) fn take_in_resized(&mut self, name: &str, resized: Result<u64, DiskError>) {
        if let Some(disk) = self.disks.iter_mut().find(|disk| disk.name() == name) {
            disk.resized();
        }
        if let Err(error) = &resized {
            tracing::warn!("disk '{name}': not resized: {error}");
        }
        let answer = resized.map(|size| Size { size, owner: None }.into());
        if let Some((asker, _)) = self.activities.end(name) {
            asker(answer.map_err(|error| ErrorKind::Failed.because(error.to_string())));
        }
    }
}
