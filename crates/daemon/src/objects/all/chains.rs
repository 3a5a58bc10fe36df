//! Disks whose chains of images are changed while they are used.
//!
//! A disk first gets options with which that can be done, for which its users wait some milliseconds; then the job
//! begins. When that has ended, it gets those again that it had.

use super::Objects;
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::command::CommitOrder;
use crate::objects::changes;
use crate::objects::mirror::Commit;
use crate::options::DiskOptions;
use fathom_files::gate;
use fathom_formats::served::Beside;

/// What is to be done with a disk once it has the options for it.
pub(super) enum Next {
    Commit(Box<Commit>),
}

impl Objects {
    pub(super) fn begin_commit(&mut self, index: usize, order: &CommitOrder, asker: Asker) {
        match self.begin_to_commit(index, order) {
            Ok(next) => {
                let name = self.disks[index].name().to_owned();
                self.next.insert(name.clone(), next);
                self.busy.insert(name, asker);
            }
            Err(refusal) => asker(Err(refusal)),
        }
    }

    fn begin_to_commit(&self, index: usize, order: &CommitOrder) -> Result<Next, Refusal> {
        let disk = &self.disks[index];
        let conflict = |problem: String| {
            let name = disk.name();
            Kind::Conflict.because(format!("disk '{name}' cannot be committed: {problem}"))
        };
        let problem = match gate::other() {
            Some(_) => Some("tenants' disks cannot be, while they are used".to_owned()),
            None => (disk.may_not_be_mirrored()).or_else(|| disk.may_not_have_layer()),
        };
        problem.map_or(Ok(()), |problem| Err(conflict(problem)))?;
        let commit = disk.commit(order, self.nbd.is_some());
        let commit = commit.map_err(|problem| Kind::Invalid.because(problem))?;
        let beside = Beside::Below(commit.depth);
        self.begin_to_work(index, Some(beside), &conflict)?;
        Ok(Next::Commit(Box::new(commit)))
    }

    /// The disk gets other options, but for that the same.
    fn begin_to_work(
        &self,
        index: usize,
        beside: Option<Beside>,
        conflict: &dyn Fn(String) -> Refusal,
    ) -> Result<(), Refusal> {
        let disk = &self.disks[index];
        if let Some(refusal) = self.is_busy(disk.name()) {
            return Err(refusal);
        }
        disk.may_be_left().map_err(conflict)?;
        let table = disk.table().cloned();
        let table = table.ok_or_else(|| conflict("its options are not known".into()))?;
        let mut options = DiskOptions::of(table, self.nbd.is_some()).map_err(conflict)?;
        options.disk.beside = beside;
        self.begin_remake(index, options, None, conflict)
    }

    /// It has the options for that.
    pub(super) fn go_on(&mut self, index: usize, next: Next, asker: Asker) {
        let disk = &self.disks[index];
        let Next::Commit(commit) = next;
        let begun = match disk.order_to_commit(*commit) {
            Ok(order) => changes::begin_mirror(order, self.mail.post())
                .map_err(|error| format!("cannot start a thread: {error}")),
            Err(problem) => Err(problem),
        };
        match begun {
            Ok(()) => drop(self.busy.insert(disk.name().to_owned(), asker)),
            Err(problem) => self.end_work(index, Err(Kind::Failed.because(problem)), asker),
        }
    }

    /// No job changes its chain any more: answers once it has the options that it had.
    pub(super) fn end_work(&mut self, index: usize, answer: Answer, asker: Asker) {
        if !self.disks[index].is_worked_on() {
            return asker(answer);
        }
        let failed = |problem: String| Kind::Failed.because(problem);
        match self.begin_to_work(index, None, &failed) {
            Ok(()) => {
                let name = self.disks[index].name().to_owned();
                // (If it fails, that is told, and the disk goes on as it is.)
                self.busy.insert(name, Box::new(move |_| asker(answer)));
            }
            Err(refusal) => {
                tracing::warn!("{refusal}");
                asker(answer);
            }
        }
    }
}
