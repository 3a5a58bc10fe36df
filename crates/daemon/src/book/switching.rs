//! Disks that go on with other images, and their files, which follow.
//!
//! Users wait while a disk's file is written: whenever the server is killed, it has the disk again as it was last.

use super::{Book, Origin};
use crate::answer::{Asker, Kind, Refusal};
use crate::command::{Command, Completion, SwitchTo};
use crate::files::Found;
use fathom_spec::DiskSpec;
use serde_json::Value;

impl Book {
    /// Why a disk does not get another image unless `unkept`: the server's command line or configuration says which it has.
    pub(super) fn said_elsewhere(&self, name: &str, unkept: bool) -> Option<Refusal> {
        let is_said = self.origins.get(name) == Some(&Origin::Configuration);
        (is_said && !unkept).then(|| {
            let place = match self.places.get(name) {
                Some(place) => format!("in {place}"),
                None => "on the server's command line".to_owned(),
            };
            Kind::Conflict.because(format!(
                "disk '{name}' is defined {place}, which would still name the old image after a restart; change the \
                 definition and repeat with --transient, or add disks with 'fathom disk add'"
            ))
        })
    }

    /// Switches a disk to another image.
    pub(super) fn switch(&mut self, name: String, to: SwitchTo, how: &Completion, asker: Asker) {
        if let Some(refusal) = self.said_elsewhere(&name, how.unkept) {
            return asker(Err(refusal));
        }
        let leave_bitmaps = how.leave_bitmaps;
        let (kept, command) = (name.clone(), Command::BeginSwitch { to, leave_bitmaps });
        self.then(Some(name), command, move |book, answer| match answer {
            Err(refusal) => asker(Err(refusal)),
            // (The file may be just being written for another reason.)
            Ok(table) => book.when_written(&kept.clone(), move |book| {
                book.keep_switched(kept, table, asker);
            }),
        });
    }

    /// The disk's users wait.
    fn keep_switched(&mut self, name: String, mut table: Value, asker: Asker) {
        let Some(Origin::Kept(before)) = self.origins.get(&name).cloned() else {
            return self.switch_unwritten(name, table["image"].take(), asker);
        };
        let wanted: DiskSpec = match serde_json::from_value::<DiskSpec>(table) {
            Ok(table) => before.switched_to(table),
            Err(error) => return self.go_back(name, *before, error.to_string(), asker),
        };
        self.write(wanted, move |book, outcome| match outcome {
            Ok(()) => book.end_switch(name, Some(*before), asker),
            Err(problem) => book.go_back(name, *before, problem, asker),
        });
    }

    /// Ends the switch of a disk that has no file. The image that a static disk leaves is noted: a reload
    /// must not bring the disk back to it.
    fn switch_unwritten(&mut self, name: String, now: Value, asker: Asker) {
        if !self.is_static(&name) {
            return self.end_switch(name, None, asker);
        }
        // (The disk still has the image that it leaves.)
        let disk = Some(name.clone());
        self.then(disk, Command::Show, move |book, shown| {
            let left = shown.map(|mut disk| disk["options"]["image"].take());
            let (disk, command) = (Some(name.clone()), Command::EndSwitch { go: true });
            book.then(disk, command, move |book, answer| match answer {
                Ok(_) => {
                    book.note_switch(&name, &left.unwrap_or_default(), &now);
                    book.show(name, asker);
                }
                Err(refusal) => asker(Err(refusal)),
            });
        });
    }

    /// It goes on with the other image. `before`: what its file has said.
    fn end_switch(&mut self, name: String, before: Option<DiskSpec>, asker: Asker) {
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
    fn go_back(&mut self, name: String, before: DiskSpec, problem: String, asker: Asker) {
        tracing::error!("{problem}");
        let refusal = Kind::Failed.because(format!(
            "disk '{name}': not switched: {problem}; the disk keeps its image"
        ));
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
    fn keep_as_before(&mut self, before: DiskSpec, refusal: Refusal, asker: Asker) {
        self.write_again(before, move |_, _| asker(Err(refusal)));
    }

    /// `then` hears whether the disk's file says so. If it cannot be written, it says what it says.
    fn write_again(
        &mut self,
        before: DiskSpec,
        then: impl FnOnce(&mut Book, bool) + Send + 'static,
    ) {
        let wanted = before.clone();
        // (Without a keeper, nothing has been written.)
        if self.keeper.is_none() {
            return then(self, true);
        }
        self.write(before, move |book, outcome| {
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
    }
}
