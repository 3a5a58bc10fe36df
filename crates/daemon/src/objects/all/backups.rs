//! Disks of which backups are made.

use super::freezing::no_thread;
use super::{Objects, to_json};
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::command::BackupOrder;
use crate::info::BackupInfo;
use crate::objects::backup::Running;
use crate::objects::changes;
use crate::table::check_path;
use fathom_files::gate;

impl Objects {
    /// Keep the disk as it is now.
    pub(super) fn begin_backup(&mut self, index: usize, order: BackupOrder, asker: Asker) {
        if let Some(refusal) = self.may_not_be_backed_up(index, &order) {
            return asker(Err(refusal));
        }
        let disk = &self.disks[index];
        let order = match disk.backup_order(order) {
            Ok(order) => order,
            Err(problem) => return asker(Err(Kind::Invalid.because(problem))),
        };
        let name = disk.name().to_owned();
        match changes::begin_backup(order, self.mail.post()) {
            Ok(()) => drop(self.busy.insert(name, asker)),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    fn may_not_be_backed_up(&self, index: usize, order: &BackupOrder) -> Option<Refusal> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.is_busy(name) {
            return Some(refusal);
        }
        let paths = order.socket.iter().chain(&order.scratch);
        if let Some(text) = paths.map(|path| check_path(path)).find_map(Result::err) {
            return Some(Kind::Invalid.because(text));
        }
        let problem = match gate::other() {
            Some(_) => Some("tenants' disks cannot be backed up while they are used".to_owned()),
            None if disk.is_changed_by_others() => {
                Some("other processes may change it, who would not be noticed".to_owned())
            }
            None => disk.may_not_be_disturbed(),
        };
        problem.map(|problem| Kind::Conflict.because(format!("disk '{name}': {problem}")))
    }

    pub(super) fn take_in_backup(&mut self, name: &str, begun: Result<Running, String>) {
        let asker = self.busy.remove(name);
        let index = self.disks.iter().position(|disk| disk.name() == name);
        // (It does not go while it is busy.)
        let (Some(asker), Some(index)) = (asker, index) else {
            return;
        };
        asker(match begun {
            Ok(running) => {
                let info = running.info();
                self.disks[index].set_backup(running);
                to_json(&info)
            }
            Err(problem) => {
                Err(Kind::Failed
                    .because(format!("no backup of disk '{name}' can be made: {problem}")))
            }
        });
    }

    /// Have its users go on.
    pub(super) fn go_on_with_backup(&self, index: usize) -> Answer {
        let disk = &self.disks[index];
        let Some(running) = disk.backup() else {
            let text = format!("there is no backup of disk '{}'", disk.name());
            return Err(Kind::Unknown.because(text));
        };
        let info = match (running.go_on(), running.info()) {
            (false, info) if info.problem.is_none() => {
                let text = format!("the backup of disk '{}' is ending", disk.name());
                return Err(Kind::Conflict.because(text));
            }
            (_, info) => info,
        };
        to_json(&info)
    }

    /// Keep it no more.
    pub(super) fn end_backup(&mut self, index: usize, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        if self.busy.contains_key(&name)
            && let Some(refusal) = self.is_busy(&name)
        {
            return asker(Err(refusal));
        }
        let Some(running) = self.disks[index].backup().cloned() else {
            let text = format!("there is no backup of disk '{name}'");
            return asker(Err(Kind::Unknown.because(text)));
        };
        match changes::end_backup(name.clone(), running, self.mail.post()) {
            Ok(()) => drop(self.busy.insert(name, asker)),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    pub(super) fn take_in_ended_backup(&mut self, name: &str, info: &BackupInfo) {
        if let Some(disk) = self.disks.iter_mut().find(|disk| disk.name() == name) {
            disk.forget_backup();
        }
        if let Some(asker) = self.busy.remove(name) {
            asker(to_json(info));
        }
    }
}
