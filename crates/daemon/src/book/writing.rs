//! Writes the files of persistent disks, one change of a disk after the other.
//!
//! A definition changes only once its file is durable, and each change is made to the definition that
//! the change before has left.

use super::{Book, Origin};
use fathom_spec::DiskSpec;

impl Book {
    /// Runs a step about a disk's definition once the disk's file is not being written.
    pub(super) fn when_written(
        &mut self,
        name: &str,
        step: impl FnOnce(&mut Book) + Send + 'static,
    ) {
        match self.writing.get_mut(name) {
            Some(writing) if writing.in_progress > 0 => writing.waiting.push_back(Box::new(step)),
            _ => step(self),
        }
    }

    /// Writes a persistent disk's file. If that succeeds, the definition is the new one when `next` runs.
    pub(super) fn write(
        &mut self,
        table: DiskSpec,
        next: impl FnOnce(&mut Book, Result<(), String>) + Send + 'static,
    ) {
        let table = table.with_format();
        let (name, written) = (table.name.clone(), table.clone());
        let done = self.ending(name.clone(), move |book, outcome| {
            if outcome.is_ok() {
                book.origins.insert(name, Origin::Kept(Box::new(written)));
            }
            next(book, outcome);
        });
        match &self.keeper {
            Some(keeper) => keeper.keep(table, done),
            None => done(Err(
                "the server has no disks-dir, so it cannot store the disk's definition; start it \
                 with --disks-dir"
                    .into(),
            )),
        }
    }

    /// Removes a disk's file.
    pub(super) fn erase(
        &mut self,
        name: String,
        next: impl FnOnce(&mut Book, Result<(), String>) + Send + 'static,
    ) {
        let done = self.ending(name.clone(), next);
        match &self.keeper {
            Some(keeper) => keeper.forget(name, done),
            None => done(Ok(())),
        }
    }

    /// Begins a write or a removal. The result is called at its end.
    fn ending(
        &mut self,
        name: String,
        next: impl FnOnce(&mut Book, Result<(), String>) + Send + 'static,
    ) -> Box<dyn FnOnce(Result<(), String>) + Send> {
        self.writing.entry(name.clone()).or_default().in_progress += 1;
        self.later(move |book: &mut Book, outcome| {
            if let Some(writing) = book.writing.get_mut(&name) {
                writing.in_progress -= 1;
            }
            next(book, outcome);
            book.run_waiting(&name);
        })
    }

    /// Runs the steps that wait, up to one that begins to write.
    fn run_waiting(&mut self, name: &str) {
        while let Some(writing) = self.writing.get_mut(name)
            && writing.in_progress == 0
        {
            match writing.waiting.pop_front() {
                Some(step) => step(self),
                None => drop(self.writing.remove(name)),
            }
        }
    }
}
