//! Disks that go on with other images, and their files, which follow.
//!
//! Users wait while a disk's file is written: whenever the server is killed, it has the disk again as it was last.

use super::{Book, Origin};
use crate::answer::{Asker, Kind, Refusal};
use crate::command::{Command, SwitchTo};
use crate::files::Found;
use crate::table::DiskTable;
use serde_json::Value;

impl Book {
    /// Why a disk does not get another image unless `unkept`: the server's command line or configuration says which it has.
    pub(super) fn said_elsewhere(&self, name: &str, unkept: bool) -> Option<Refusal> {
        let is_said = self.origins.get(name) == Some(&Origin::Configuration);
        (is_said && !unkept).then(|| {
            Kind::Conflict.because(format!(
                "the image of disk '{name}' is said on the server's command line or in its configuration: when it starts \
                 again it would have that one. If that will be changed before, say so (--unkept)"
            ))
        })
    }

    /// `unkept`: even if it would have the old image when the server starts again.
    pub(super) fn switch(&mut self, name: String, to: SwitchTo, unkept: bool, asker: Asker) {
        if let Some(refusal) = self.said_elsewhere(&name, unkept) {
            return asker(Err(refusal));
        }
        let (kept, command) = (name.clone(), Command::BeginSwitch(to));
        self.then(Some(name), command, move |book, answer| match answer {
            Err(refusal) => asker(Err(refusal)),
            Ok(table) => book.keep_switched(kept, table, asker),
        });
    }

    /// The disk's users wait.
    fn keep_switched(&mut self, name: String, table: Value, asker: Asker) {
        let Some(Origin::Kept(before)) = self.origins.get(&name).cloned() else {
            return self.end_switch(name, None, asker);
        };
        let wanted: DiskTable = match serde_json::from_value::<DiskTable>(table) {
            // (What holds for now only is not kept.)
            Ok(table) => DiskTable {
                allow_dirs: table.allow_dirs,
                ..before.clone().on(table.image, table.format)
            },
            Err(error) => return self.go_back(name, *before, error.to_string(), asker),
        };
        let Some(keeper) = &self.keeper else {
            return self.end_switch(name, None, asker);
        };
        let table = wanted.clone();
        let done = self.later(move |book: &mut Book, outcome| match outcome {
            Ok(()) => {
                book.origins
                    .insert(name.clone(), Origin::Kept(Box::new(table)));
                book.end_switch(name, Some(*before), asker);
            }
            Err(problem) => book.go_back(name, *before, problem, asker),
        });
        keeper.keep(wanted, done);
    }

    /// It goes on with the other image. `before`: what its file has said.
    fn end_switch(&mut self, name: String, before: Option<DiskTable>, asker: Asker) {
        let command = Command::EndSwitch { go: true };
        let disk = name.clone();
        self.then(Some(name), command, move |book, answer| match answer {
            Ok(_) => book.show(disk, asker),
            Err(refusal) => match before {
                Some(before) => book.keep_as_before(before, refusal, asker),
                None => asker(Err(refusal)),
            },
        });
    }

    /// It is to go on as before, since it cannot be kept with the other image.
    fn go_back(&mut self, name: String, before: DiskTable, problem: String, asker: Asker) {
        tracing::error!("{problem}");
        let refusal = Kind::Failed.because(format!("disk '{name}' stays as it is: {problem}"));
        // (It may have been written, and is not known to be durable.)
        self.write_again(before, move |book, is_as_before| {
            let command = Command::EndSwitch { go: !is_as_before };
            let disk = name.clone();
            book.then(Some(name), command, move |book, _| match is_as_before {
                true => asker(Err(refusal)),
                false => book.show(disk, asker),
            });
        });
    }

    /// It has gone on as before.
    fn keep_as_before(&mut self, before: DiskTable, refusal: Refusal, asker: Asker) {
        self.write_again(before, move |_, _| asker(Err(refusal)));
    }

    /// `then` hears whether the disk's file says so. If it cannot be written, it says what it says.
    fn write_again(
        &mut self,
        before: DiskTable,
        then: impl FnOnce(&mut Book, bool) + Send + 'static,
    ) {
        let name = before.name.clone();
        self.origins
            .insert(name, Origin::Kept(Box::new(before.clone())));
        let wanted = before.clone();
        let done = self.later(move |book: &mut Book, outcome: Result<(), String>| {
            let Err(problem) = outcome else {
                return then(book, true);
            };
            tracing::error!("{problem}");
            let read = book.later(move |book: &mut Book, found: Found| {
                let found = found.disks.into_iter().find(|one| one.name == wanted.name);
                let is_as_before = found.as_ref().is_none_or(|one| one.image == wanted.image);
                if let Some(table) = found {
                    let origin = Origin::Kept(Box::new(table));
                    book.origins.insert(wanted.name, origin);
                }
                then(book, is_as_before);
            });
            if let Some(keeper) = &book.keeper {
                keeper.read(read);
            }
        });
        // (Without one, nothing has been written.)
        match &self.keeper {
            Some(keeper) => keeper.keep(before, done),
            None => done(Ok(())),
        }
    }
}
