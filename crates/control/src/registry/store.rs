//! Writes the files of persistent disks, one change of a disk after another.
//!
//! A definition changes only when its file is durable. Each change starts from the previous result.

use super::{Registry, log, reply};
use crate::definition::Definition;
use crate::entry::{AfterWrite, Requester, Revert, Work};
use crate::error::{ErrorKind, RequestError};
use crate::event::{Effect, HostRequest, Level};
use crate::request::Reply;
use fathom_spec::DiskSpec;

impl Registry {
    /// Writes a persistent disk's file.
    pub(super) fn write(
        &mut self,
        name: &str,
        spec: DiskSpec,
        then: AfterWrite,
        out: &mut Vec<Effect>,
    ) {
        let spec = Box::new(spec.with_format());
        if self.settings.disks_dir.is_none() {
            let problem = "the server has no disks-dir, so it cannot store the disk's definition; \
                           start it with --disks-dir";
            return self.written(name, spec, then, Err(problem.to_owned()), out);
        }
        out.push(Effect::Write(spec.clone()));
        self.entry(name).work = Some(Work::Writing { spec, then });
    }

    /// Continues after a write or removal of a file.
    pub(super) fn stored(
        &mut self,
        name: &str,
        outcome: Result<(), String>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        entry.is_file_uncertain = outcome.is_err();
        match entry.work.take() {
            Some(Work::Writing { spec, then }) => self.written(name, spec, then, outcome, out),
            Some(Work::Erasing { by, statistics }) => {
                self.erased(name, by, statistics, outcome, out);
            }
            Some(Work::ErasingWithdrawn { by, problem }) => {
                self.withdrawal_stored(name, by, problem, outcome, out);
            }
            other => self.entry(name).work = other,
        }
    }

    fn written(
        &mut self,
        name: &str,
        spec: Box<DiskSpec>,
        then: AfterWrite,
        outcome: Result<(), String>,
        out: &mut Vec<Effect>,
    ) {
        if outcome.is_ok() {
            let entry = self.entry(name);
            entry.owner = Some(Definition::Persistent(spec.clone()));
            // The owner may have been the configuration before.
            entry.left_images.clear();
        }
        match (then, outcome) {
            (AfterWrite::Put { by, created }, Ok(())) => {
                reply(by, name, Ok(Reply::Disk { created }), out);
            }
            (AfterWrite::Put { by, created: true }, Err(problem)) => {
                log(Level::Error, name, &problem, out);
                let request = HostRequest::Remove {
                    force: true,
                    only_if: Default::default(),
                };
                self.ask(name, request, Work::Withdrawing { by, problem }, out);
            }
            (AfterWrite::Put { by, created: false }, Err(problem))
            | (AfterWrite::Reply { by, .. }, Err(problem)) => {
                not_stored(by, name, &problem, out);
            }
            (AfterWrite::Reply { by, reply: answer }, Ok(())) => reply(by, name, Ok(answer), out),
            (AfterWrite::Switch { by, before }, Ok(())) => {
                let before = Some(before);
                let left = None;
                let work = Work::EndingSwitch { by, before, left };
                self.ask(name, HostRequest::EndSwitch { go: true }, work, out);
            }
            (AfterWrite::Switch { by, before }, Err(problem)) => {
                self.undo_switch(name, by, *before, &problem, out);
            }
            (AfterWrite::Withdrawn { by, problem }, outcome) => {
                self.withdrawal_stored(name, by, problem, outcome, out);
            }
            (AfterWrite::Revert(revert), Ok(())) => self.reverted(name, revert, true, out),
            (AfterWrite::Revert(revert), Err(problem)) => {
                log(Level::Error, name, &problem, out);
                let before = spec;
                let then = revert;
                self.entry(name).work = Some(Work::ReadingFile { before, then });
                let disk = name.to_owned();
                out.push(Effect::ReadFile { disk });
            }
        }
    }

    /// Continues with the contents of the disk's file, after two writes have failed.
    pub(super) fn file_read(
        &mut self,
        name: &str,
        found: Result<Option<Box<DiskSpec>>, String>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        let Some(Work::ReadingFile { before, then }) = entry.work.take() else {
            return;
        };
        let is_as_before = match &found {
            Ok(None) => true,
            Ok(Some(spec)) => spec.image == before.image,
            // The file may name the new image. The old image is marked as superseded, so the disk
            // continues on the new image. Then no old data is served after a restart, even if the
            // file still names the old image.
            Err(_) => false,
        };
        match found {
            Ok(None) => {}
            Ok(Some(spec)) => {
                entry.is_file_uncertain = false;
                entry.owner = Some(Definition::Persistent(spec));
            }
            Err(problem) => log(Level::Error, name, &problem, out),
        }
        self.reverted(name, then, is_as_before, out);
    }

    /// Ends a failed switch. `is_as_before`: whether the disk's file names the old image again.
    fn reverted(&mut self, name: &str, revert: Revert, is_as_before: bool, out: &mut Vec<Effect>) {
        match revert {
            Revert::BeforeSwitch { by, error } => {
                let is_switched = !is_as_before;
                let request = HostRequest::EndSwitch { go: is_switched };
                let work = Work::UndoingSwitch {
                    by,
                    error,
                    is_switched,
                };
                self.ask(name, request, work, out);
            }
            Revert::AfterSwitch { by, error } => reply(by, name, Err(error), out),
        }
    }

    /// Restores the file after it could not be written for a switch, while users wait.
    fn undo_switch(
        &mut self,
        name: &str,
        by: Requester,
        before: DiskSpec,
        problem: &str,
        out: &mut Vec<Effect>,
    ) {
        log(Level::Error, name, problem, out);
        let error = ErrorKind::Failed.because(format!(
            "disk '{name}': not switched: {problem}; the disk keeps its image"
        ));
        let revert = Revert::BeforeSwitch { by, error };
        match self.settings.disks_dir {
            // The failed write may have changed the file.
            Some(_) => self.write(name, before, AfterWrite::Revert(revert), out),
            None => self.reverted(name, revert, true, out),
        }
    }

    /// Restores the file after the host has rejected the end of a switch.
    pub(super) fn revert_switch(
        &mut self,
        name: &str,
        by: Requester,
        before: DiskSpec,
        error: RequestError,
        out: &mut Vec<Effect>,
    ) {
        let revert = Revert::AfterSwitch { by, error };
        self.write(name, before, AfterWrite::Revert(revert), out);
    }
}

/// Replies to a change that is in effect but not stored.
fn not_stored(by: Requester, name: &str, problem: &str, out: &mut Vec<Effect>) {
    log(Level::Error, name, problem, out);
    let error = ErrorKind::Failed.because(format!(
        "the change lasts only until the server restarts: {problem}; repeat the change when the \
         file can be written"
    ));
    reply(by, name, Err(error), out);
}
