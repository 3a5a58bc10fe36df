//! Removes disks.

use super::{Registry, log, not_served, reply};
use crate::condition::Condition;
use crate::definition::Definition;
use crate::entry::{Presence, Removing, Requester, Waiting, Work};
use crate::error::{ErrorKind, RequestError};
use crate::event::{Done, Effect, HostRequest, Level, Slot};
use crate::request::{Removal, Reply};
use fathom_trace::Summary;

impl Registry {
    pub(super) fn begin_removal(
        &mut self,
        name: &str,
        by: Requester,
        force: bool,
        how: Removal,
        only_if: Condition,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        if !entry.is_served() && entry.owner.is_some() {
            return match only_if.check(name, None) {
                Ok(()) => self.remove_unserved(name, by, how, out),
                Err(error) => reply(by, name, Err(error), out),
            };
        }
        if let Some(problem) = entry.conflict.as_ref().filter(|_| !entry.is_served()) {
            return reply(by, name, Err(not_served(name, problem)), out);
        }
        entry.removal = Some(Removing {
            by,
            how,
            is_forced: force,
        });
        out.push(Effect::Ask {
            disk: name.to_owned(),
            slot: Slot::Removal,
            request: HostRequest::Remove { force, only_if },
        });
    }

    /// Removes a disk that is defined but not served.
    fn remove_unserved(&mut self, name: &str, by: Requester, how: Removal, out: &mut Vec<Effect>) {
        let entry = self.entry(name);
        let is_persistent = matches!(entry.owner, Some(Definition::Persistent(_)));
        let was_failed = matches!(entry.presence, Presence::Failed { .. });
        if is_persistent && how == Removal::Definition {
            return self.erase(name, by, Box::default(), out);
        }
        if !was_failed {
            let text = format!("disk '{name}': already removed until the server restarts");
            return reply(by, name, Err(ErrorKind::Unknown.because(text)), out);
        }
        entry.presence = Presence::Absent;
        let is_static = entry.is_static();
        let statistics = Box::default();
        let removed = Reply::Removed {
            statistics,
            is_static,
        };
        reply(by, name, Ok(removed), out);
    }

    /// Continues after the host has removed the disk, or has rejected that.
    pub(super) fn removal_done(
        &mut self,
        name: &str,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        let Some(Removing { by, how, .. }) = entry.removal.take() else {
            return;
        };
        let outcome = match outcome {
            Ok(Done::Removed(statistics)) => Ok(statistics),
            Ok(_) => Ok(Box::default()),
            Err(error) => Err(error),
        };
        match entry.work {
            // A change of the disk may be writing the disk's file.
            Some(_) => entry.waiting.push_front(Waiting::Removed(by, how, outcome)),
            None => self.finish_removal(name, by, how, outcome, out),
        }
    }

    /// Removes or keeps the definition of a disk that the host has removed.
    pub(super) fn finish_removal(
        &mut self,
        name: &str,
        by: Requester,
        how: Removal,
        outcome: Result<Box<Summary>, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        let statistics = match outcome {
            Ok(statistics) => statistics,
            // The host may have lost the disk.
            Err(error) if error.kind == ErrorKind::Unknown && entry.owner.is_some() => {
                Box::default()
            }
            Err(error) => return reply(by, name, Err(error), out),
        };
        entry.presence = Presence::Absent;
        match (&entry.owner, how) {
            (Some(Definition::Transient) | None, _) | (_, Removal::Undefined) => {
                entry.owner = None;
                entry.left_images.clear();
                reply(by, name, Ok(removed(statistics, false)), out);
            }
            (Some(Definition::Persistent(_)), Removal::Definition) => {
                self.erase(name, by, statistics, out);
            }
            (Some(owner), _) => {
                let is_static = *owner == Definition::Static;
                reply(by, name, Ok(removed(statistics, is_static)), out);
            }
        }
    }

    /// Removes the file of a disk that is no longer served.
    fn erase(
        &mut self,
        name: &str,
        by: Requester,
        statistics: Box<Summary>,
        out: &mut Vec<Effect>,
    ) {
        self.entry(name).work = Some(Work::Erasing { by, statistics });
        let disk = name.to_owned();
        out.push(Effect::Erase { disk });
    }

    /// Replies after the disk's file was removed, or could not be.
    pub(super) fn erased(
        &mut self,
        name: &str,
        by: Requester,
        statistics: Box<Summary>,
        outcome: Result<(), String>,
        out: &mut Vec<Effect>,
    ) {
        let entry = self.entry(name);
        entry.presence = Presence::Absent;
        match outcome {
            Ok(()) => {
                entry.owner = None;
                reply(by, name, Ok(removed(statistics, false)), out);
            }
            Err(problem) => {
                log(Level::Error, name, &problem, out);
                let error = ErrorKind::Failed.because(format!(
                    "disk '{name}': removed only until the server restarts: {problem}; repeat \
                     the removal when the file can be removed"
                ));
                reply(by, name, Err(error), out);
            }
        }
    }
}

fn removed(statistics: Box<Summary>, is_static: bool) -> Reply {
    Reply::Removed {
        statistics,
        is_static,
    }
}
