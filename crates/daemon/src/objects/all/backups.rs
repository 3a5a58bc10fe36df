//! Disks of which backups are made.

use super::Objects;
use super::freezing::no_thread;
use crate::objects::activity::Change;
use crate::objects::backup::Running;
use crate::objects::changes;
use crate::orders::BackupOrder;
use crate::reply::{Answer, Asker};
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_metrics::BackupInfo;
use fathom_spec::check_path;

impl Objects {
    /// Begins a backup of that identity.
    pub(super) fn begin_backup(
        &mut self,
        index: usize,
        id: String,
        order: BackupOrder,
        asker: Asker,
    ) {
        if self.ended_backups.has(&id) {
            return asker(Err(ended_early(&id)));
        }
        if let Some(refusal) = self.may_not_be_backed_up(index, &order) {
            return asker(Err(refusal));
        }
        let disk = &self.disks[index];
        let order = match disk.backup_order(id.clone(), order) {
            Ok(order) => order,
            Err(problem) => return asker(Err(ErrorKind::Invalid.because(problem))),
        };
        let name = disk.name().to_owned();
        match changes::begin_backup(order, self.mail.post()) {
            Ok(()) => {
                let change = Change::StartingBackup { id, end: None };
                self.activities.begin(&name, asker, change);
            }
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    fn may_not_be_backed_up(&self, index: usize, order: &BackupOrder) -> Option<RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.activities.busy(name) {
            return Some(refusal);
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

    pub(super) fn take_in_backup(&mut self, name: &str, begun: Result<Running, String>) {
        let Some((index, asker, change)) = self.changed(name) else {
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
                asker(Ok(info.into()));
            }
            (Ok(running), Some(end)) => {
                let id = running.id().to_owned();
                asker(Err(ended_early(&id)));
                self.disks[index].set_backup(running);
                self.end_backup(index, &id, end);
            }
            (Err(problem), end) => {
                let text = format!("disk '{name}': backup not started: {problem}");
                let refusal = ErrorKind::Failed.because(text);
                end.into_iter().for_each(|end| end(Err(refusal.clone())));
                asker(Err(refusal));
            }
        }
    }

    /// The disk's backup of that identity.
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

    /// Lets users go on whom the backup of that identity holds.
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

    /// Ends the backup of that identity. If it is just beginning, it ends as soon as it has begun; if it has not begun, it
    /// never will.
    pub(super) fn end_backup(&mut self, index: usize, id: &str, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        self.ended_backups.add(id);
        if let Some(Change::StartingBackup { id: beginning, end }) =
            self.activities.change_mut(&name)
            && beginning == id
        {
            return match end {
                None => *end = Some(asker),
                Some(_) => {
                    let text = format!("disk '{name}': its backup is already ending");
                    asker(Err(ErrorKind::Conflict.because(text)));
                }
            };
        }
        if self.activities.is_changing(&name)
            && let Some(refusal) = self.activities.busy(&name)
        {
            return asker(Err(refusal));
        }
        let running = match self.backup_of(index, id) {
            Ok(running) => running.clone(),
            Err(refusal) => return asker(Err(refusal)),
        };
        match changes::end_backup(name.clone(), running, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, asker, Change::Plain),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    pub(super) fn take_in_ended_backup(&mut self, name: &str, info: BackupInfo) {
        if let Some(disk) = self.disks.iter_mut().find(|disk| disk.name() == name) {
            disk.forget_backup();
        }
        if let Some((asker, _)) = self.activities.end(name) {
            asker(Ok(info.into()));
        }
    }
}

fn ended_early(id: &str) -> RequestError {
    ErrorKind::Conflict.because(format!("backup {id} was ended before it began"))
}
