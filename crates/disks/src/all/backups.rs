//! Begins and ends backups.

use super::Objects;
use super::freezing::no_thread;
use crate::activity::Change;
use crate::backup::Running;
use crate::changes;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_metrics::BackupInfo;
use fathom_requests::{Answer, BackupOrder, Responder};
use fathom_spec::check_path;

impl Objects {
    /// Begins a backup with this identity.
    pub(super) fn begin_backup(
        &mut self,
        index: usize,
        id: String,
        order: BackupOrder,
        responder: Responder,
    ) {
        if self.ended_backups.has(&id) {
            return responder(Err(ended_early(&id)));
        }
        if let Some(error) = self.may_not_be_backed_up(index, &order) {
            return responder(Err(error));
        }
        let disk = &self.disks[index];
        let order = match disk.backup_order(id.clone(), order) {
            Ok(order) => order,
            Err(problem) => return responder(Err(ErrorKind::Invalid.because(problem))),
        };
        let name = disk.name().to_owned();
        match changes::begin_backup(order, self.mail.post()) {
            Ok(()) => {
                let change = Change::StartingBackup { id, end: None };
                self.activities.begin(&name, responder, change);
            }
            Err(error) => responder(Err(no_thread(&error))),
        }
    }

    fn may_not_be_backed_up(&self, index: usize, order: &BackupOrder) -> Option<RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(error) = self.activities.busy(name) {
            return Some(error);
        }
        let paths = order.socket.iter().chain(&order.scratch);
        if let Some(text) = paths.map(|path| check_path(path)).find_map(Result::err) {
            return Some(ErrorKind::Invalid.because(text));
        }
        let problem = match gate::other() {
            Some(_) => Some(
                "a tenant's disk in use cannot be backed up; stop its virtual machine first"
                    .to_owned(),
            ),
            None if disk.is_changed_by_others() => {
                Some("other processes may change the image, which a backup would miss".to_owned())
            }
            None => disk.may_not_be_disturbed(),
        };
        problem.map(|problem| ErrorKind::Conflict.because(format!("disk '{name}': {problem}")))
    }

    pub(super) fn on_backup_begun(&mut self, name: &str, begun: Result<Running, String>) {
        let Some((index, responder, change)) = self.changed(name) else {
            return;
        };
        let end = match change {
            Change::StartingBackup { end, .. } => end,
            _ => None,
        };
        match (begun, end) {
            (Ok(running), None) => {
                let info = running.info();
                self.disks[index].set_backup(running);
                responder(Ok(info.into()));
            }
            (Ok(running), Some(end)) => {
                let id = running.id().to_owned();
                responder(Err(ended_early(&id)));
                self.disks[index].set_backup(running);
                self.end_backup(index, &id, end);
            }
            (Err(problem), end) => {
                let text = format!("disk '{name}': backup not started: {problem}");
                let error = ErrorKind::Failed.because(text);
                end.into_iter().for_each(|end| end(Err(error.clone())));
                responder(Err(error));
            }
        }
    }

    /// Returns the disk's backup with this identity.
    fn backup_of(&self, index: usize, id: &str) -> Result<&Running, RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        match disk.backup() {
            Some(running) if running.id() == id => Ok(running),
            Some(running) => Err(ErrorKind::Conflict.because(format!(
                "disk '{name}': backup {id} has ended; backup {} has begun since",
                running.id()
            ))),
            None => {
                let text = format!("disk '{name}': no backup with the identity {id}");
                Err(ErrorKind::Unknown.because(text))
            }
        }
    }

    /// Resumes the front-end and clients that the backup with this identity holds.
    pub(super) fn go_on_with_backup(&self, index: usize, id: &str) -> Answer {
        let running = self.backup_of(index, id)?;
        let info = match (running.go_on(), running.info()) {
            (false, info) if info.problem.is_none() => {
                let text = format!("disk '{}': its backup is ending", self.disks[index].name());
                return Err(ErrorKind::Conflict.because(text));
            }
            (_, info) => info,
        };
        Ok(info.into())
    }

    /// Ends the backup with this identity. A backup that is just beginning ends as soon as it has
    /// begun. A backup that has not begun can no longer begin.
    pub(super) fn end_backup(&mut self, index: usize, id: &str, responder: Responder) {
        let name = self.disks[index].name().to_owned();
        self.ended_backups.add(id);
        if let Some(Change::StartingBackup { id: beginning, end }) =
            self.activities.change_mut(&name)
            && beginning == id
        {
            return match end {
                None => *end = Some(responder),
                Some(_) => {
                    let text = format!("disk '{name}': its backup is already ending");
                    responder(Err(ErrorKind::Conflict.because(text)));
                }
            };
        }
        if self.activities.is_changing(&name)
            && let Some(error) = self.activities.busy(&name)
        {
            return responder(Err(error));
        }
        let running = match self.backup_of(index, id) {
            Ok(running) => running.clone(),
            Err(error) => return responder(Err(error)),
        };
        match changes::end_backup(name.clone(), running, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, responder, Change::Plain),
            Err(error) => responder(Err(no_thread(&error))),
        }
    }

    pub(super) fn on_backup_ended(&mut self, name: &str, info: BackupInfo) {
        if let Some(disk) = self.disks.iter_mut().find(|disk| disk.name() == name) {
            disk.forget_backup();
        }
        if let Some((responder, _)) = self.activities.end(name) {
            responder(Ok(info.into()));
        }
    }
}

fn ended_early(id: &str) -> RequestError {
    ErrorKind::Conflict.because(format!("backup {id} was ended before it began"))
}
