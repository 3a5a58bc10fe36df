//! Starts the operations that the registry wants, and reports their ends to it.

use super::Controller;
use fathom_control::{
    Done, Effect, ErrorKind, Event, HostRequest, Level, Owner, Request, RequestError, RequestId,
    Slot,
};
use fathom_requests::{Command, Filter, Reply, Responder, Shown, Size, Statistics};
use fathom_spec::DiskSpec;
use std::time::Instant;

impl Controller {
    /// Passes a request to the registry, whose reply goes to `responder`.
    pub(super) fn request(&mut self, disk: String, request: Request, responder: Responder) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.responders.insert(id, responder);
        self.feed(Event::Requested { id, disk, request });
    }

    /// Passes an event to the registry.
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
            } => self.have_done(disk, slot, request),
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
                if let Some(responder) = self.responders.remove(&to) {
                    self.reply(disk, reply, responder);
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

    fn have_done(&mut self, disk: String, slot: Slot, request: HostRequest) {
        let command = command_of(&request);
        self.then(&disk.clone(), command, move |controller, answer| {
            let is_switch = matches!(request, HostRequest::BeginSwitch { .. });
            let is_done = answer.is_ok();
            let outcome = answer.and_then(|reply| controller.done_of(&disk, &request, reply));
            if is_switch && is_done && outcome.is_err() {
                // (Guests and clients wait.)
                controller.give_up_switch(&disk);
            }
            controller.feed(Event::HostDone {
                disk,
                slot,
                outcome,
            });
        });
    }

    /// Reads the host's reply.
    fn done_of(
        &mut self,
        disk: &str,
        request: &HostRequest,
        reply: Reply,
    ) -> Result<Done, RequestError> {
        Ok(match request {
            HostRequest::Put { .. } => {
                let shown = Shown::try_from(reply)?;
                let created = shown.created;
                self.note_shown(disk, shown);
                Done::Put { created }
            }
            HostRequest::Remove { .. } => {
                Done::Removed(Box::new(Statistics::try_from(reply)?.summary))
            }
            HostRequest::SetFilter { .. } => Done::FilterSet(Filter::try_from(reply)?.info()),
            HostRequest::Resize { .. } => Done::Resized(Size::try_from(reply)?.size),
            HostRequest::BeginSwitch { .. } => {
                Done::SwitchPrepared(Box::new(DiskSpec::try_from(reply)?))
            }
            HostRequest::EndSwitch { .. } => {
                self.note_shown(disk, Shown::try_from(reply)?);
                Done::Switched
            }
            HostRequest::ShowOptions => {
                let shown = Shown::try_from(reply)?;
                let options = Box::new(shown.options.clone());
                self.note_shown(disk, shown);
                Done::Options(options)
            }
        })
    }

    /// Stores how the host shows a disk that it has changed, for the reply to the request.
    fn note_shown(&mut self, disk: &str, shown: Shown) {
        // (Changes that the server begins by itself have no responder.)
        if !self.responders.is_empty() {
            self.shown.insert(disk.to_owned(), shown);
        }
    }

    fn give_up_switch(&mut self, disk: &str) {
        let command = Command::EndSwitch { go: false };
        self.then(disk, command, |_, _| {});
    }

    /// Sends a reply to the responder.
    fn reply(
        &mut self,
        disk: String,
        reply: Result<fathom_control::Reply, RequestError>,
        responder: Responder,
    ) {
        use fathom_control::Reply;
        let shown = self.shown.remove(&disk);
        let owner = |is_static: bool| is_static.then_some(Owner::Static);
        responder(reply.and_then(|reply| {
            match reply {
                Reply::Disk { created } => match shown {
                    Some(shown) => Ok(self.disk(Shown { created, ..shown }).into()),
                    None => Err(ErrorKind::Failed.because(format!("disk '{disk}': not shown"))),
                },
                Reply::Removed {
                    statistics,
                    is_static,
                } => Ok(Statistics {
                    summary: *statistics,
                    owner: owner(is_static),
                }
                .into()),
                Reply::Filter { info, is_static } => Ok(Filter::new(info, owner(is_static)).into()),
                Reply::Size { bytes, is_static } => Ok(Size {
                    size: bytes,
                    owner: owner(is_static),
                }
                .into()),
            }
        }));
    }
}

fn no_directory() -> String {
    "the server has no disks-dir".to_owned()
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
