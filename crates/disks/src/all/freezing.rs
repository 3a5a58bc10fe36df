//! Freezes and thaws disks.

use super::Objects;
use crate::activity::Change;
use crate::changes::Event;
use crate::freeze::{Users, Waiting};
use crate::nbd::Nbd;
use fathom_control::{ErrorKind, RequestError};
use fathom_metrics::Happened;
use fathom_requests::{Frozen, Responder};
use fathom_units::cause;
use std::time::{Duration, Instant};

impl Objects {
    /// Freezes a disk, for at most `timeout`.
    pub(super) fn freeze(&mut self, index: usize, timeout: Option<Duration>, responder: Responder) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        if let Some(error) = self.is_on_its_way(&name) {
            return responder(Err(error));
        }
        let users = self.users_of(index);
        let (post, of) = (self.mail.post(), name.clone());
        let tell = move |frozen| post.send(Event::Frozen(of, Box::new(frozen)));
        let begun = users.begin_to_freeze(tell);
        if let Err(error) = begun {
            return responder(Err(no_thread(&error)));
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.activities
            .begin(&name, responder, Change::Freezing { until });
    }

    /// Returns the front-end and the clients of a disk.
    pub(super) fn users_of(&self, index: usize) -> Users {
        let (disk, server) = (&self.disks[index], self.nbd.as_ref().map(Nbd::server));
        Users {
            export: disk.export_shared(),
            clients: server.zip(disk.export_name().map(str::to_owned)),
            file: disk.file_shared(),
        }
    }

    /// Thaws a disk.
    pub(super) fn thaw(&mut self, index: usize, responder: Responder) {
        let name = self.disks[index].name().to_owned();
        let Some(waiting) = self.activities.take_frozen(&name) else {
            let text = format!("disk '{name}': not frozen");
            return responder(Err(ErrorKind::Conflict.because(text)));
        };
        let (post, of) = (self.mail.post(), name.clone());
        match waiting.begin_to_thaw(move || post.send(Event::Thawed(of))) {
            Ok(()) => self.activities.begin(&name, responder, Change::Plain),
            Err(error) => {
                tracing::warn!(
                    "disk '{name}': cannot start a thread to thaw the disk, so it is thawed at \
                     once: {}",
                    cause(error)
                );
                self.tell_changed(&name);
                responder(Ok(Frozen { frozen: false }.into()));
            }
        }
    }

    pub(super) fn on_frozen(&mut self, name: &str, frozen: Result<Waiting, String>) {
        let Some((responder, change)) = self.activities.end(name) else {
            return;
        };
        let until = match change {
            Change::Freezing { until } => until,
            _ => None,
        };
        let answer = frozen.map(|users| {
            tracing::info!("disk '{name}': frozen; requests wait until 'fathom disk thaw'");
            self.activities.set_frozen(name, users, until);
            self.tell_changed(name);
            Frozen { frozen: true }.into()
        });
        responder(answer.map_err(|problem| {
            ErrorKind::Failed.because(format!("disk '{name}': not frozen: {problem}"))
        }));
    }

    pub(super) fn on_thawed(&mut self, name: &str) {
        tracing::info!("disk '{name}': thawed; requests continue");
        self.tell_changed(name);
        if let Some((responder, _)) = self.activities.end(name) {
            responder(Ok(Frozen { frozen: false }.into()));
        }
    }

    /// Thaws disks whose timeouts have passed.
    pub(super) fn thaw_late(&mut self) {
        let now = Instant::now();
        let frozen = self.activities.frozen();
        let late = frozen.filter(|(_, until)| until.is_some_and(|until| until <= now));
        let late: Vec<_> = late.map(|(name, _)| name.clone()).collect();
        for name in late {
            tracing::warn!("disk '{name}': frozen for the maximum time; the disk is thawed");
            if let Ok(index) = self.find(&name) {
                self.thaw(index, Box::new(|_| {}));
            }
        }
    }

    /// Returns the time until the next disk must be thawed. None: no frozen disk has a timeout.
    pub(super) fn until_next_thaw(&self) -> Option<Duration> {
        let next = { self.activities.frozen() }
            .filter_map(|(_, until)| until)
            .min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Thaws all disks, before the server ends.
    pub(super) fn thaw_all(&mut self) {
        let frozen: Vec<_> = { self.activities.frozen() }
            .map(|(name, _)| name.clone())
            .collect();
        for name in frozen {
            self.activities
                .take_frozen(&name)
                .into_iter()
                .for_each(Waiting::thaw);
        }
    }

    fn tell_changed(&self, name: &str) {
        let disk = name.to_owned();
        self.common.events.tell(Happened::Changed { disk });
    }
}

pub(super) fn no_thread(error: &std::io::Error) -> RequestError {
    ErrorKind::Failed.because(format!("cannot start a thread: {}", cause(error)))
}
