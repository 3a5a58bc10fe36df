//! Resizes disks.

use super::Objects;
use crate::activity::Change;
use crate::changes;
use fathom_control::{ErrorKind, RequestError};
use fathom_core::DiskError;
use fathom_requests::{Responder, Size};
use fathom_units::cause;

impl Objects {
    pub(super) fn resize(
        &mut self,
        index: usize,
        size: Option<u64>,
        shrink: bool,
        responder: Responder,
    ) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        if let Some(error) = self.is_on_its_way(&name) {
            return responder(Err(error));
        }
        if let Err(error) = changes::resize(disk, size, shrink, self.mail.post()) {
            let text = format!("cannot start a thread: {}", cause(error));
            return responder(Err(ErrorKind::Failed.because(text)));
        }
        self.activities.begin(&name, responder, Change::Plain);
    }

    /// Resizes disks whose files another program has resized, unless another operation on the disk
    /// is in progress.
    pub(super) fn resize_changed_files(&mut self) {
        let noted = self.activities.new_sizes();
        let noted = noted.filter(|name| self.is_on_its_way(name).is_none());
        let noted: Vec<_> = noted.cloned().collect();
        for name in noted {
            self.activities.forget_size(&name);
            if let Some(index) = self.disks.iter().position(|disk| disk.name() == name) {
                // (`on_resized` logs a failure.)
                self.resize(index, None, false, Box::new(drop));
            }
        }
    }

    /// Returns why a disk cannot be changed now: another operation or job is in progress, or the
    /// disk is moving between servers.
    pub(super) fn is_on_its_way(&self, name: &str) -> Option<RequestError> {
        let disk = self.disks.iter().find(|disk| disk.name() == name);
        let problem = disk.and_then(|disk| disk.may_not_be_disturbed());
        let error =
            problem.map(|problem| ErrorKind::Conflict.because(format!("disk '{name}': {problem}")));
        self.activities.busy(name).or(error)
    }

    pub(super) fn on_resized(&mut self, name: &str, resized: Result<u64, DiskError>) {
        if let Some(disk) = self.disks.iter_mut().find(|disk| disk.name() == name) {
            disk.resized();
        }
        if let Err(error) = &resized {
            tracing::warn!("disk '{name}': resize failed: {error}");
        }
        let answer = resized.map(|size| Size { size, owner: None }.into());
        if let Some((responder, _)) = self.activities.end(name) {
            responder(answer.map_err(|error| ErrorKind::Failed.because(error.to_string())));
        }
    }
}
