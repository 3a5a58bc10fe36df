//! Disks that come, change and go, and their files, which follow.

use super::{Book, Origin};
use crate::answer::{Answer, Asker, Kind};
use crate::command::Command;
use crate::table::DiskTable;
use fathom_stack::position_of_filter;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A host may wait so long for the users of a disk that is to go.
const LEAVE: Duration = Duration::from_secs(1);

impl Book {
    /// What a request to the server wants of a disk.
    pub(super) fn put_by_request(&mut self, table: DiskTable, temporary: bool, asker: Asker) {
        match temporary || self.keeper.is_none() {
            true => self.put(table, Origin::Request, false, asker),
            false => {
                let origin = Origin::Kept(Box::new(table.clone().without_defaults()));
                self.put(table, origin, true, asker);
            }
        }
    }

    /// Let there be this disk. `keep`: its file is to be written.
    pub(super) fn put(&mut self, table: DiskTable, origin: Origin, keep: bool, asker: Asker) {
        let name = table.name.clone();
        let command = Command::Put {
            options: Box::new(table),
            temporary: true,
        };
        self.then(None, command, move |book, answer| match answer {
            Err(refusal) => asker(Err(refusal)),
            Ok(disk) => book.settle(name, origin, keep, disk["created"] == true, asker),
        });
    }

    /// The disk is there: note whether it is to be so again.
    fn settle(&mut self, name: String, origin: Origin, keep: bool, is_new: bool, asker: Asker) {
        if is_new {
            self.origins.insert(name.clone(), Origin::Request);
        }
        let is_as_before = self.origins.get(&name) == Some(&origin);
        match (keep && self.keeper.is_some() && !is_as_before, &origin) {
            (true, _) => return self.keep(name, origin, is_new, asker),
            // It was asked for only for now.
            (false, Origin::Request) => {}
            (false, _) => drop(self.origins.insert(name.clone(), origin)),
        }
        self.show(name, asker);
    }

    /// Write a disk's file, and tell how the disk is then. If that fails, a disk that has just come
    /// goes again.
    fn keep(&mut self, name: String, origin: Origin, is_new: bool, asker: Asker) {
        let (Origin::Kept(table), Some(keeper)) = (&origin, &self.keeper) else {
            return self.show(name, asker);
        };
        let kept = name.clone();
        let done = self.later(move |book: &mut Book, outcome| match outcome {
            Ok(()) => book.show(kept, asker),
            Err(problem) => book.tell_not_kept(kept, problem, is_new, asker),
        });
        keeper.keep((**table).clone(), done);
        self.origins.insert(name, origin);
    }

    fn tell_not_kept(&mut self, name: String, problem: String, is_new: bool, asker: Asker) {
        tracing::error!("{problem}");
        if !is_new {
            let text = format!("this holds until the server starts again: {problem}");
            return asker(Err(Kind::Failed.because(text)));
        }
        let command = Command::Remove {
            force: true,
            temporary: true,
        };
        self.then(Some(name.clone()), command, move |book, _| {
            book.origins.remove(&name);
            asker(Err(Kind::Failed.because(problem)));
        });
    }

    /// Serve a disk no more. `forget`: its file is to go, too.
    pub(super) fn remove(&mut self, name: String, force: bool, forget: bool, asker: Asker) {
        let timeout = self.stop_timeout;
        let leave = if force { Duration::ZERO } else { LEAVE };
        let text = format!(
            "disk '{name}' still has requests in flight after {timeout}: it is removed as soon as \
             they have ended"
        );
        let until = Instant::now() + leave + timeout.0;
        let asker = self.waiting.until(until, text, asker);
        let command = Command::Remove {
            force,
            temporary: true,
        };
        self.then(
            Some(name.clone()),
            command,
            move |book, answer| match answer {
                Err(refusal) => asker(Err(refusal)),
                Ok(summary) => book.forget(name, forget, summary, asker),
            },
        );
    }

    fn forget(&mut self, name: String, forget: bool, summary: Value, asker: Asker) {
        let origin = self.origins.remove(&name);
        let (true, Some(Origin::Kept(_)), Some(keeper)) = (forget, origin, &self.keeper) else {
            return asker(Ok(summary));
        };
        let gone = name.clone();
        let done = self.later(move |_: &mut Book, outcome: Result<(), String>| {
            asker(outcome.map(|()| summary).map_err(|problem| {
                tracing::error!("{problem}");
                Kind::Failed.because(format!(
                    "disk '{gone}' is removed until the server starts again: {problem}"
                ))
            }));
        });
        keeper.forget(name, done);
    }

    /// Change options of a filter.
    pub(super) fn set_filter(
        &mut self,
        name: String,
        filter: String,
        options: BTreeMap<String, String>,
        temporary: bool,
        asker: Asker,
    ) {
        let asker = self.briefly(Some(&name), asker);
        let command = Command::Set {
            filter: filter.clone(),
            options: options.clone(),
            temporary: true,
        };
        self.then(Some(name.clone()), command, move |book, answer| {
            let changed = |table: &mut DiskTable| {
                let names: Vec<_> = table.filters.iter().map(|spec| &*spec.name).collect();
                if let Ok(at) = position_of_filter(&names, &filter) {
                    table.set_filter(at, &options);
                }
            };
            let is_done = answer.as_ref().is_ok_and(|_| !temporary);
            match is_done {
                true => book.keep_changed(name, changed, answer, asker),
                false => asker(answer),
            }
        });
    }

    pub(super) fn resize(&mut self, name: String, size: Option<u64>, shrink: bool, asker: Asker) {
        let text = format!("disk '{name}' takes long to get another size, and goes on");
        let until = Instant::now() + self.stop_timeout.0;
        let asker = self.waiting.until(until, text, asker);
        let command = Command::Resize { size, shrink };
        self.then(Some(name.clone()), command, move |book, answer| {
            let size = answer
                .as_ref()
                .ok()
                .and_then(|answer| answer["size"].as_u64());
            let changed = |table: &mut DiskTable| {
                if let Some(location) = size.and_then(|size| table.image.with_size(size)) {
                    table.image = location;
                }
            };
            book.keep_changed(name, changed, answer, asker);
        });
    }

    /// Write the file of a disk that is kept, if `change` makes another one of it; then tell `answer`.
    fn keep_changed(
        &mut self,
        name: String,
        change: impl FnOnce(&mut DiskTable),
        answer: Answer,
        asker: Asker,
    ) {
        let Some(Origin::Kept(before)) = self.origins.get(&name) else {
            return asker(answer);
        };
        let mut table = before.clone();
        change(&mut table);
        match table == *before {
            true => asker(answer),
            false => {
                let tell = Box::new(|kept: Answer| asker(kept.and(answer)));
                self.keep(name, Origin::Kept(table), false, tell);
            }
        }
    }
}
