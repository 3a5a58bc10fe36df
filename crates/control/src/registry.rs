//! The state machine of all disks' names.
//!
//! - `put` adds and changes disks, `remove` removes them;
//! - `change` sets options of filters and sizes, `switch` changes images;
//! - `store` writes the files of persistent disks;
//! - `definitions` compares the configuration and `disks-dir` with the disks that are served.

mod change;
mod definitions;
mod handover;
mod put;
mod remove;
mod store;
mod switch;

use crate::definition::Definition;
use crate::entry::{Entry, Presence, Requester, Waiting, Work};
use crate::error::{ErrorKind, RequestError, changing_disk};
use crate::event::{Done, Effect, Event, HostRequest, Level, Slot};
use crate::owner::Owner;
use crate::request::{Reply, Request};
use crate::second_definition::file_of;
use fathom_spec::DiskSpec;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Maximum number of requests that wait for the change of one disk.
const MAX_WAITING: usize = 64;

/// Options of the server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Settings {
    /// Directory of the files of persistent disks. `None`: definitions cannot be stored.
    pub disks_dir: Option<PathBuf>,
    /// Address of an NBD listener that does not authenticate clients, as the user wrote it.
    pub open_listener: Option<String>,
}

/// All names, with their owners and the operations in progress.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Registry {
    settings: Settings,
    entries: BTreeMap<String, Entry>,
    /// `FILE:LINE` of each disk's entry in the configuration.
    places: BTreeMap<String, String>,
}

/// A disk that is defined but could not be opened.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure<'a> {
    /// Name of the disk.
    pub name: &'a str,
    /// Owner of the name.
    pub owner: Owner,
    /// The definition, if there is exactly one and it can be read.
    pub spec: Option<&'a DiskSpec>,
    /// Why the disk could not be opened: a message for the user, in one line.
    pub problem: &'a str,
    /// Whether the server retries by itself.
    pub is_retried: bool,
}

impl Registry {
    /// Returns a registry in which these static disks are served.
    pub fn new(
        settings: Settings,
        served: impl IntoIterator<Item = DiskSpec>,
        places: BTreeMap<String, String>,
    ) -> Registry {
        let entry = |spec: DiskSpec| {
            let name = spec.name.clone();
            let entry = Entry {
                declared: Some(Box::new(spec)),
                owner: Some(Definition::Static),
                presence: Presence::Served,
                ..Entry::default()
            };
            (name, entry)
        };
        Registry {
            settings,
            entries: served.into_iter().map(entry).collect(),
            places,
        }
    }

    /// Processes an event and returns the operations to start, in this order.
    pub fn take(&mut self, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        let out = &mut effects;
        match event {
            Event::Requested { id, disk, request } => {
                self.request(&disk, Requester::Client(id), request, out);
                self.run_waiting(&disk, out);
            }
            Event::HostDone {
                disk,
                slot: Slot::Change,
                outcome,
            } => {
                self.change_done(&disk, outcome, out);
                self.run_waiting(&disk, out);
            }
            Event::HostDone {
                disk,
                slot: Slot::Removal,
                outcome,
            } => {
                self.removal_done(&disk, outcome, out);
                self.run_waiting(&disk, out);
            }
            Event::Stored { disk, outcome } => {
                self.stored(&disk, outcome, out);
                self.run_waiting(&disk, out);
            }
            Event::FileRead { disk, found } => {
                self.file_read(&disk, found, out);
                self.run_waiting(&disk, out);
            }
            Event::RetryDue { disk } => {
                self.retry(&disk, out);
                self.run_waiting(&disk, out);
            }
            Event::DefinitionsRead {
                declared,
                places,
                found,
            } => {
                self.places = places;
                self.compare(declared, &found, out);
                let names: Vec<_> = self.entries.keys().cloned().collect();
                names.iter().for_each(|name| self.run_waiting(name, out));
            }
        }
        effects
    }

    /// Returns `FILE:LINE` of each disk's entry in the configuration.
    pub fn places(&self) -> &BTreeMap<String, String> {
        &self.places
    }

    /// Returns whether no operation is in progress.
    pub fn is_settled(&self) -> bool {
        self.entries.values().all(Entry::is_settled)
    }

    /// Returns the owner of a disk's name, whether or not the disk is served. `None`: the name is
    /// free.
    pub fn owner_of(&self, name: &str) -> Option<Owner> {
        let entry = self.entries.get(name)?;
        let declared = entry.declared.as_ref().map(|_| Owner::Static);
        let owner = entry.owner.as_ref().map(Definition::owner);
        // A file that cannot be read owns its name.
        let conflict = entry.conflict.as_ref().map(|_| Owner::Persistent);
        owner.or(declared).or(conflict)
    }

    /// Returns what a disk is after a restart. `None`: the disk is transient, or the name is free.
    pub fn definition_of(&self, name: &str) -> Option<&DiskSpec> {
        let entry = self.entries.get(name)?;
        match &entry.owner {
            Some(Definition::Persistent(stored)) => Some(stored),
            Some(Definition::Static) => entry.declared.as_deref(),
            Some(Definition::Transient) | None => None,
        }
    }

    /// Returns the disks that are defined but could not be opened, by name.
    pub fn failures(&self) -> impl Iterator<Item = Failure<'_>> {
        self.entries.iter().filter_map(|(name, entry)| {
            let (problem, is_retried) = entry.failure()?;
            Some(Failure {
                name,
                owner: self.owner_of(name)?,
                spec: entry.stored().or(entry.declared.as_deref()),
                problem,
                is_retried,
            })
        })
    }

    /// Rejects a change of a static disk's image, unless `transient`.
    ///
    /// After a restart, the disk's definition would still name the old image.
    pub fn check_image_change(&self, name: &str, transient: bool) -> Result<(), RequestError> {
        let is_static = self.entries.get(name).is_some_and(Entry::is_static);
        match is_static && !transient {
            false => Ok(()),
            true => Err(ErrorKind::Conflict.because(format!(
                "disk '{name}' is defined {}, which would still name the old image after a \
                 restart; change the definition and repeat with --transient, or add disks with \
                 'fathom disk add'",
                self.place_of(name)
            ))),
        }
    }

    /// Returns the place of a static disk's definition, as part of a sentence.
    fn place_of(&self, name: &str) -> String {
        match self.places.get(name) {
            Some(place) => format!("in {place}"),
            None => "on the server's command line".to_owned(),
        }
    }

    /// Returns the path of a persistent disk's file, for messages.
    fn file_of(&self, name: &str) -> String {
        file_of(self.settings.disks_dir.as_deref(), name)
    }

    fn entry(&mut self, name: &str) -> &mut Entry {
        self.entries.entry(name.to_owned()).or_default()
    }

    fn request(&mut self, name: &str, by: Requester, request: Request, out: &mut Vec<Effect>) {
        let entry = self.entry(name);
        let waits = match (&entry.work, &request) {
            (_, Request::Remove { .. }) if entry.removal.is_some() => {
                return reply(by, name, Err(changing_disk(name, false)), out);
            }
            (_, _) if let Some(removal) = entry.removal => {
                if removal.is_forced {
                    return reply(by, name, Err(changing_disk(name, false)), out);
                }
                true
            }
            (None, _) => false,
            (Some(work), _) if work.is_about_file() => true,
            // A host that does not reply can still remove the disk.
            (Some(_), Request::Remove { .. }) if entry.is_served() => false,
            (Some(work), _) if work.is_short() => true,
            (Some(_), _) => {
                let error = busy(name, entry, &request);
                return reply(by, name, Err(error), out);
            }
        };
        match (waits, entry.waiting.len() < MAX_WAITING) {
            (false, _) => self.begin(name, by, request, out),
            (true, true) => entry.waiting.push_back(Waiting::Request(by, request)),
            (true, false) => {
                let text = format!(
                    "disk '{name}': {MAX_WAITING} requests wait for a change of the disk; retry \
                     when it has completed"
                );
                reply(by, name, Err(ErrorKind::Conflict.because(text)), out);
            }
        }
    }

    fn begin(&mut self, name: &str, by: Requester, request: Request, out: &mut Vec<Effect>) {
        match request {
            Request::Put {
                spec,
                named,
                until_restart,
                only_if,
            } => self.begin_put(name, by, *spec, named, until_restart, only_if, out),
            Request::Remove {
                force,
                how,
                only_if,
            } => self.begin_removal(name, by, force, how, only_if, out),
            Request::SetFilter {
                filter,
                options,
                until_restart,
            } => self.begin_to_set_filter(name, by, filter, options, until_restart, out),
            Request::Resize { size, shrink } => self.begin_resize(name, by, size, shrink, out),
            Request::Switch {
                to,
                transient,
                leave_bitmaps,
            } => self.begin_switch(name, by, to, transient, leave_bitmaps, out),
            Request::Adopt { defined_at } => self.begin_to_adopt(name, by, defined_at, out),
        }
    }

    /// Runs waiting operations until one begins a change. Forgets the name if it is free.
    fn run_waiting(&mut self, name: &str, out: &mut Vec<Effect>) {
        while let Some(entry) = self.entries.get_mut(name)
            && entry.work.is_none()
            && entry.removal.is_none()
            && let Some(next) = entry.waiting.pop_front()
        {
            match next {
                Waiting::Request(by, request) => self.request(name, by, request, out),
                Waiting::Removed(by, how, outcome) => {
                    self.finish_removal(name, by, how, outcome, out);
                }
                Waiting::Definition {
                    spec,
                    owner,
                    before,
                } => {
                    if self.is_owner(name, before.as_ref(), out) {
                        self.begin_definition(name, *spec, owner, out);
                    }
                }
                Waiting::Undefined { before } => {
                    if self.is_owner(name, before.as_ref(), out) {
                        self.remove_one_undefined(name, out);
                    }
                }
            }
        }
        if self.entries.get(name).is_some_and(Entry::is_free) {
            self.entries.remove(name);
        }
    }

    /// Continues a change after the host has carried out or rejected a step.
    fn change_done(
        &mut self,
        name: &str,
        outcome: Result<Done, RequestError>,
        out: &mut Vec<Effect>,
    ) {
        let Some(work) = self.entry(name).work.take() else {
            return;
        };
        match work {
            Work::Putting(putting) => self.put_done(name, putting, outcome, out),
            Work::Withdrawing { by, problem } => self.withdrawn(name, by, problem, out),
            Work::SettingFilter {
                by,
                filter,
                options,
                until_restart,
            } => {
                let changes = (!until_restart).then_some((filter, options));
                self.filter_set(name, by, changes, outcome, out);
            }
            Work::Resizing { by } => self.resized(name, by, outcome, out),
            Work::Adopting { by } => self.adopt_shown(name, by, outcome, out),
            Work::PreparingSwitch { by } => self.switch_prepared(name, by, outcome, out),
            Work::ShowingImage { by, now } => self.image_shown(name, by, now, outcome, out),
            Work::EndingSwitch { by, before, left } => {
                self.switched(name, by, before, left, outcome, out);
            }
            Work::UndoingSwitch {
                by,
                error,
                is_switched,
            } => match is_switched {
                true => reply(by, name, Ok(Reply::Disk { created: false }), out),
                false => reply(by, name, Err(error), out),
            },
            // The host has no part in these steps.
            work @ (Work::Writing { .. }
            | Work::ReadingFile { .. }
            | Work::Erasing { .. }
            | Work::ErasingWithdrawn { .. }) => self.entry(name).work = Some(work),
        }
    }

    /// Begins a step that the host carries out.
    fn ask(&mut self, name: &str, request: HostRequest, work: Work, out: &mut Vec<Effect>) {
        self.entry(name).work = Some(work);
        out.push(Effect::Ask {
            disk: name.to_owned(),
            slot: Slot::Change,
            request,
        });
    }

    /// Rejects requests about a disk that is defined but not served.
    pub fn check_served(&self, name: &str) -> Result<(), RequestError> {
        match self.entries.get(name).and_then(Entry::failure) {
            None => Ok(()),
            Some((problem, _)) => Err(not_served(name, problem)),
        }
    }
}

/// Returns the error for a request about a disk that could not be opened.
fn not_served(name: &str, problem: &str) -> RequestError {
    ErrorKind::Conflict.because(format!("disk '{name}': not served: {problem}"))
}

/// Returns the error while another request changes the disk.
fn busy(name: &str, entry: &Entry, request: &Request) -> RequestError {
    if let Request::Put { only_if, .. } = request {
        if entry.is_served()
            && only_if.rules_out_existing()
            && let Err(error) = only_if.check(name, Some(""))
        {
            return error;
        }
        if entry.is_served() && only_if.names_versions() {
            return crate::condition::Condition::overtaken(name);
        }
    }
    match entry.work {
        Some(Work::Putting(_)) if !entry.is_served() => changing_disk(name, true),
        _ => ErrorKind::Conflict.because(format!(
            "disk '{name}': being changed by another request; retry when that request has \
             completed"
        )),
    }
}

/// Sends a reply; the server's own errors are logged.
fn reply(by: Requester, name: &str, outcome: Result<Reply, RequestError>, out: &mut Vec<Effect>) {
    match (by, outcome) {
        (Requester::Client(to), reply) => out.push(Effect::Reply {
            to,
            disk: name.to_owned(),
            reply,
        }),
        (Requester::Server, Ok(_)) => {}
        (Requester::Server, Err(error)) => log(Level::Error, name, &error.text, out),
    }
}

/// Logs a line about a disk, prefixed with its name unless the line begins with it.
fn log(level: Level, name: &str, text: &str, out: &mut Vec<Effect>) {
    let start = format!("disk '{name}'");
    let line = match text.starts_with(&start) {
        true => text.to_owned(),
        false => format!("{start}: {text}"),
    };
    out.push(Effect::Log(level, line));
}
