//! Starts the operations that the registry wants, and reports their ends to it.

use super::Controller;
use crate::answer::{Answer, Asker};
use crate::command::Command;
use fathom_control::{
    Done, Effect, ErrorKind, Event, HostRequest, Level, Owner, Reply, Request, RequestError,
    RequestId, Slot,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Instant;

impl Controller {
    /// Gives the registry a request, whose reply the asker gets.
    pub(super) fn request(&mut self, disk: String, request: Request, asker: Asker) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.askers.insert(id, asker);
        self.feed(Event::Requested { id, disk, request });
    }

    /// Gives the registry an event.
    pub(super) fn feed(&mut self, event: Event) {
        let effects = self.registry.take(event);
        self.start(effects);
    }

    /// Starts operations.
    pub(super) fn start(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.start_one(effect);
        }
    }

    fn start_one(&mut self, effect: Effect) {
        match effect {
            Effect::Ask {
                disk,
                slot,
                request,
            } => self.ask_host(disk, slot, request),
            Effect::Write(spec) => {
                let disk = spec.name.clone();
                let done = self
                    .later(|controller, outcome| controller.feed(Event::Stored { disk, outcome }));
                match &self.keeper {
                    Some(keeper) => keeper.keep(*spec, done),
                    None => done(Err(no_directory())),
                }
            }
            Effect::Erase { disk } => {
                let name = disk.clone();
                let done = self
                    .later(|controller, outcome| controller.feed(Event::Stored { disk, outcome }));
                match &self.keeper {
                    Some(keeper) => keeper.forget(name, done),
                    None => done(Err(no_directory())),
                }
            }
            Effect::ReadFile { disk } => {
                let name = disk.clone();
                let done = self
                    .later(|controller, found| controller.feed(Event::FileRead { disk, found }));
                match &self.keeper {
                    Some(keeper) => keeper.read_one(name, done),
                    None => done(Ok(None)),
                }
            }
            Effect::Reply { to, disk, reply } => {
                if let Some(asker) = self.askers.remove(&to) {
                    self.reply(disk, reply, asker);
                }
            }
            Effect::RetryAfter { disk, pause } => {
                self.retries.insert(disk, Instant::now() + pause);
            }
            Effect::Log(Level::Error, line) => tracing::error!("{line}"),
            Effect::Log(Level::Warning, line) => tracing::warn!("{line}"),
            Effect::Log(Level::Info, line) => tracing::info!("{line}"),
        }
    }

    /// Tries again to open the disks whose time has come.
    pub(super) fn retry_due(&mut self) {
        let now = Instant::now();
        let due = self.retries.iter().filter(|(_, at)| **at <= now);
        let due: Vec<_> = due.map(|(disk, _)| disk.clone()).collect();
        for disk in due {
            self.retries.remove(&disk);
            self.feed(Event::RetryDue { disk });
        }
    }

    fn ask_host(&mut self, disk: String, slot: Slot, request: HostRequest) {
        let name = match request {
            HostRequest::Put { .. } => None,
            _ => Some(disk.clone()),
        };
        let command = command_of(&request);
        self.then(name, command, move |controller, answer| {
            controller.note_shown(&disk, &request, &answer);
            let is_done = answer.is_ok();
            let outcome = answer.and_then(|value| done_of(&request, value));
            let is_switch = matches!(request, HostRequest::BeginSwitch { .. });
            if is_switch && is_done && outcome.is_err() {
                // (Users wait.)
                controller.give_up_switch(&disk);
            }
            controller.feed(Event::HostDone {
                disk,
                slot,
                outcome,
            });
        });
    }

    /// Keeps how the host shows a disk that it has changed, for the reply to the request.
    fn note_shown(&mut self, disk: &str, request: &HostRequest, answer: &Answer) {
        let is_shown = matches!(
            request,
            HostRequest::Put { .. } | HostRequest::EndSwitch { .. } | HostRequest::ShowOptions
        );
        // (Nobody waits for what the server does by itself.)
        if let (true, false, Ok(value)) = (is_shown, self.askers.is_empty(), answer) {
            self.shown.insert(disk.to_owned(), value.clone());
        }
    }

    fn give_up_switch(&mut self, disk: &str) {
        let command = Command::EndSwitch { go: false };
        self.then(Some(disk.to_owned()), command, |_, _| {});
    }

    /// Sends a reply to the asker.
    fn reply(&mut self, disk: String, reply: Result<Reply, RequestError>, asker: Asker) {
        let shown = self.shown.remove(&disk);
        match reply {
            Err(error) => asker(Err(error)),
            Ok(Reply::Disk { created }) => {
                let mut shown = shown.unwrap_or_default();
                self.add_owner(&disk, &mut shown);
                shown["created"] = created.into();
                asker(Ok(shown));
            }
            Ok(Reply::Removed {
                statistics,
                is_static,
            }) => asker(with_owner(&statistics, is_static)),
            Ok(Reply::Filter { info, is_static }) => asker(with_owner(&info, is_static)),
            Ok(Reply::Size { bytes, is_static }) => {
                asker(with_owner(&json!({ "size": bytes }), is_static));
            }
        }
    }
}

fn no_directory() -> String {
    "the server has no disks-dir".to_owned()
}

/// The content of a reply, with `owner` if the change lasts until the server restarts.
fn with_owner(content: &impl Serialize, is_static: bool) -> Answer {
    let mut value = serde_json::to_value(content)
        .map_err(|error| ErrorKind::Failed.because(error.to_string()))?;
    if is_static && let Some(members) = value.as_object_mut() {
        members.insert("owner".into(), Owner::Static.name().into());
    }
    Ok(value)
}

fn command_of(request: &HostRequest) -> Command {
    match request.clone() {
        HostRequest::Put {
            spec,
            named,
            only_if,
        } => Command::Put {
            options: spec,
            named,
            temporary: true,
            only_if,
        },
        HostRequest::Remove { force, only_if } => Command::Remove {
            force,
            temporary: true,
            only_if,
        },
        HostRequest::SetFilter { filter, options } => Command::Set {
            filter,
            options,
            temporary: true,
        },
        HostRequest::Resize { size, shrink } => Command::Resize { size, shrink },
        HostRequest::BeginSwitch { to, leave_bitmaps } => {
            Command::BeginSwitch { to, leave_bitmaps }
        }
        HostRequest::EndSwitch { go } => Command::EndSwitch { go },
        HostRequest::ShowOptions => Command::Show,
    }
}

/// Reads the host's reply.
fn done_of(request: &HostRequest, mut value: Value) -> Result<Done, RequestError> {
    Ok(match request {
        HostRequest::Put { .. } => Done::Put {
            created: value["created"] == true,
        },
        HostRequest::Remove { .. } => Done::Removed(read(value)?),
        HostRequest::SetFilter { .. } => Done::FilterSet(read(value)?),
        HostRequest::Resize { .. } => Done::Resized(read(value["size"].take())?),
        HostRequest::BeginSwitch { .. } => Done::SwitchPrepared(read(value)?),
        HostRequest::EndSwitch { .. } => Done::Switched,
        HostRequest::ShowOptions => Done::Options(read(value["options"].take())?),
    })
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, RequestError> {
    let failed = |error| ErrorKind::Failed.because(format!("unexpected reply: {error}"));
    serde_json::from_value(value).map_err(failed)
}
