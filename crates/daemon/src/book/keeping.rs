//! Adds, changes and removes disks, and has the files of persistent disks follow.

use super::{Book, Origin, Removal};
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::command::Command;
use crate::condition::Condition;
use fathom_spec::DiskSpec;
use fathom_stack::position_of_filter;
use fathom_trace::Summary;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Time a host may wait for the users of a disk that is being removed.
const LEAVE: Duration = Duration::from_secs(1);

/// A disk that is to be served, or changed.
pub(super) struct Wanted {
    pub table: DiskSpec,
    /// Keys that are named: a disk that is served keeps the others. `None`: all are.
    pub named: Option<BTreeSet<String>>,
    pub only_if: Condition,
    /// The owner of the disk's name from then on; [`Origin::Request`] changes no owner.
    pub origin: Origin,
    /// Whether the disk's file is to be written.
    pub is_written: bool,
}

impl Wanted {
    /// A disk that is defined like this already.
    pub fn defined(table: DiskSpec, origin: Origin) -> Wanted {
        Wanted {
            table,
            named: None,
            only_if: Condition::default(),
            origin,
            is_written: false,
        }
    }
}

impl Book {
    /// Carries out a request to add or change a disk. A static disk is changed until the server restarts
    /// only, and keeps the options that the request does not name.
    pub(super) fn put_by_request(
        &mut self,
        mut table: DiskSpec,
        named: Option<BTreeSet<String>>,
        temporary: bool,
        only_if: Condition,
        asker: Asker,
    ) {
        let is_static = self.is_static(&table.name);
        if !self.origins.contains_key(&table.name)
            && !is_static
            && let Err(refusal) = self.do_not_export_unasked(&mut table)
        {
            return asker(Err(refusal));
        }
        let is_written = !is_static && !temporary && self.keeper.is_some();
        let origin = match (is_static, is_written) {
            (true, _) => Origin::Configuration,
            (false, true) => Origin::Kept(Box::new(table.clone().without_defaults().with_format())),
            (false, false) => Origin::Request,
        };
        let wanted = Wanted {
            table,
            named: named.filter(|_| is_static),
            only_if,
            origin,
            is_written,
        };
        self.put(wanted, asker);
    }

    /// Does not export a new disk to NBD clients whom nothing authenticates, unless the request asks for it.
    fn do_not_export_unasked(&self, table: &mut DiskSpec) -> Result<(), Refusal> {
        let name = &table.name;
        let Some(listener) = self.host.open_listener().filter(|_| table.nbd.is_none()) else {
            return Ok(());
        };
        if table.vhost_user.is_none() {
            return Err(Kind::Invalid.because(format!(
                "disk '{name}': no client could connect: the NBD listener {listener} \
                 authenticates no client, so it exports only disks with --nbd (nbd = true); add \
                 the disk with --nbd or --vhost-user"
            )));
        }
        tracing::warn!(
            "disk '{name}': not exported to NBD clients, because listener {listener} \
             authenticates no client; add the disk with --nbd (nbd = true) to export it"
        );
        table.nbd = Some(false);
        Ok(())
    }

    /// Has the host add or change a disk, then notes who owns it.
    pub(super) fn put(&mut self, wanted: Wanted, asker: Asker) {
        let Wanted {
            table,
            named,
            only_if,
            origin,
            is_written,
        } = wanted;
        let name = table.name.clone();
        let command = Command::Put {
            options: Box::new(table),
            named,
            temporary: true,
            only_if,
        };
        self.then(None, command, move |book, answer| match answer {
            Err(refusal) => asker(Err(refusal)),
            Ok(disk) => {
                let is_new = disk["created"] == true;
                book.when_written(&name.clone(), move |book| {
                    book.settle(name, origin, is_written, is_new, asker);
                });
            }
        });
    }

    /// The disk is served: notes who owns it.
    fn settle(
        &mut self,
        name: String,
        origin: Origin,
        is_written: bool,
        is_new: bool,
        asker: Asker,
    ) {
        let asker: Asker = Box::new(move |answer: Answer| {
            asker(answer.map(|mut disk| {
                disk["created"] = is_new.into();
                disk
            }));
        });
        if is_new {
            let owner = self.definitions.absent.remove(&name);
            self.origins
                .insert(name.clone(), owner.unwrap_or(Origin::Request));
        }
        let is_as_before = self.origins.get(&name) == Some(&origin);
        match origin {
            // (What is known of the file of a disk that was removed may be wrong.)
            Origin::Kept(table) if is_written && (is_new || !is_as_before) => {
                self.keep(*table, is_new, asker);
            }
            Origin::Request => self.show(name, asker),
            owner => {
                self.origins.insert(name.clone(), owner);
                self.show(name, asker);
            }
        }
    }

    /// Writes a disk's file, then replies with the disk. If the file cannot be written, a disk that has
    /// just been added is removed again.
    fn keep(&mut self, table: DiskSpec, is_new: bool, asker: Asker) {
        let name = table.name.clone();
        self.write(table, move |book, outcome| match outcome {
            Ok(()) => book.show(name, asker),
            Err(problem) => book.tell_not_kept(name, problem, is_new, asker),
        });
    }

    fn tell_not_kept(&mut self, name: String, problem: String, is_new: bool, asker: Asker) {
        if !is_new {
            return asker(not_written(&problem));
        }
        tracing::error!("{problem}");
        let command = Command::Remove {
            force: true,
            temporary: true,
            only_if: Condition::default(),
        };
        self.then(Some(name.clone()), command, move |book, _| {
            if let Some(owner @ Origin::Kept(_)) = book.origins.remove(&name) {
                book.definitions.absent.insert(name, owner);
            }
            asker(Err(Kind::Failed.because(problem)));
        });
    }

    /// Stops serving a disk.
    pub(super) fn remove(
        &mut self,
        name: String,
        force: bool,
        how: Removal,
        only_if: Condition,
        asker: Asker,
    ) {
        let timeout = self.stop_timeout;
        let leave = if force { Duration::ZERO } else { LEAVE };
        let text = format!(
            "disk '{name}': requests are still in flight after {timeout}; the disk is removed as \
             soon as they have completed"
        );
        let until = Instant::now() + leave + timeout.0;
        let asker = self.waiting.until(until, text, asker);
        let command = Command::Remove {
            force,
            temporary: true,
            only_if,
        };
        self.then(Some(name.clone()), command, move |book, answer| {
            book.when_written(&name.clone(), move |book| match answer {
                Ok(summary) => book.forget(name, how, summary, asker),
                // The file may be there still: its removal failed, or was not asked for.
                Err(refusal) if refusal.kind == Kind::Unknown && how == Removal::Definition => {
                    match book.definitions.absent.get(&name) {
                        Some(Origin::Kept(_)) => {
                            let nothing = serde_json::to_value(Summary::default());
                            book.erase_definition(name, nothing.unwrap_or_default(), asker);
                        }
                        _ => asker(Err(refusal)),
                    }
                }
                Err(refusal) => asker(Err(refusal)),
            });
        });
    }

    /// The disk is served no more.
    fn forget(&mut self, name: String, how: Removal, mut summary: Value, asker: Asker) {
        let owner = self.origins.remove(&name);
        match (owner, how) {
            (Some(Origin::Request) | None, _) | (_, Removal::Undefined) => asker(Ok(summary)),
            (Some(owner @ Origin::Kept(_)), Removal::Definition) => {
                self.definitions.absent.insert(name.clone(), owner);
                self.erase_definition(name, summary, asker);
            }
            (Some(owner), _) => {
                self.definitions.absent.insert(name.clone(), owner);
                self.mark_static(&name, &mut summary);
                asker(Ok(summary));
            }
        }
    }

    /// Removes the file of a disk that is served no more.
    fn erase_definition(&mut self, name: String, summary: Value, asker: Asker) {
        let disk = name.clone();
        self.erase(name, move |book, outcome| match outcome {
            Ok(()) => {
                book.definitions.absent.remove(&disk);
                asker(Ok(summary));
            }
            Err(problem) => {
                tracing::error!("{problem}");
                asker(Err(Kind::Failed.because(format!(
                    "disk '{disk}': removed only until the server restarts: {problem}; repeat \
                     the removal when the file can be removed"
                ))));
            }
        });
    }

    /// Changes options of a filter.
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
            let changed = move |table: &mut DiskSpec| {
                let names: Vec<_> = table.filters.iter().map(|spec| &*spec.name).collect();
                if let Ok(at) = position_of_filter(&names, &filter) {
                    table.set_filter(at, &options);
                }
            };
            match answer {
                Ok(mut info) => {
                    book.mark_static(&name, &mut info);
                    match temporary {
                        true => asker(Ok(info)),
                        false => book.keep_changed(name, changed, info, asker),
                    }
                }
                Err(refusal) => asker(Err(refusal)),
            }
        });
    }

    pub(super) fn resize(&mut self, name: String, size: Option<u64>, shrink: bool, asker: Asker) {
        let text =
            format!("disk '{name}': resizing takes longer than --stop-timeout and continues");
        let until = Instant::now() + self.stop_timeout.0;
        let asker = self.waiting.until(until, text, asker);
        let command = Command::Resize { size, shrink };
        self.then(Some(name.clone()), command, move |book, answer| {
            let mut reply = match answer {
                Ok(reply) => reply,
                Err(refusal) => return asker(Err(refusal)),
            };
            let size = reply["size"].as_u64();
            let resized = move |table: &DiskSpec| table.image.with_size(size?);
            // (The size of others is that of their files, and lasts.)
            let declared = book.definitions.declared.get(&name);
            if declared.and_then(&resized).is_some() {
                book.mark_static(&name, &mut reply);
            }
            let changed = move |table: &mut DiskSpec| {
                if let Some(location) = resized(table) {
                    table.image = location;
                }
            };
            book.keep_changed(name, changed, reply, asker);
        });
    }

    /// Writes the file of a persistent disk, if `change` makes a difference there, and then replies.
    fn keep_changed(
        &mut self,
        name: String,
        change: impl FnOnce(&mut DiskSpec) + Send + 'static,
        reply: Value,
        asker: Asker,
    ) {
        self.when_written(&name.clone(), move |book| {
            let Some(Origin::Kept(before)) = book.origins.get(&name) else {
                return asker(Ok(reply));
            };
            let mut table = DiskSpec::clone(before);
            change(&mut table);
            if table == **before {
                return asker(Ok(reply));
            }
            book.write(table, move |_, outcome| {
                asker(match outcome {
                    Ok(()) => Ok(reply),
                    Err(problem) => not_written(&problem),
                });
            });
        });
    }
}

/// The reply to a change that holds, but is not in the disk's file.
fn not_written(problem: &str) -> Answer {
    tracing::error!("{problem}");
    Err(Kind::Failed.because(format!(
        "the change lasts only until the server restarts: {problem}; repeat the change when the \
         file can be written"
    )))
}
