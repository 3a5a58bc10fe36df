//! Removes disks, and ends all disks when the server stops.

use super::Objects;
use crate::changes::{self, Event, Leaving};
use crate::disk::Served;
use crate::nbd::Nbd;
use fathom_control::{Condition, ErrorKind};
use fathom_host::Error;
use fathom_metrics::Happened;
use fathom_requests::Responder;
use fathom_trace::Summary;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

/// Time in which a disk that is to be removed must become unused. A client that has just
/// disconnected may still be listed.
const LEAVE: Duration = Duration::from_secs(1);
/// Interval of the checks whether such a disk is in use.
const LOOK: Duration = Duration::from_millis(20);

impl Objects {
    pub(super) fn remove(
        &mut self,
        index: usize,
        force: bool,
        only_if: Condition,
        responder: Responder,
    ) {
        let name = self.disks[index].name().to_owned();
        if let Err(error) = self.check_condition(&name, Some(index), &only_if) {
            return responder(Err(error));
        }
        match force {
            true => self.close(index, responder),
            false => self.leave(Leaving {
                name,
                responder,
                until: Instant::now() + LEAVE,
                only_if,
            }),
        }
    }

    /// Removes a disk that is not in use. A disk in use is checked again until the time is over.
    pub(super) fn leave(&mut self, leaving: Leaving) {
        let index = match self.find(&leaving.name) {
            Ok(index) => index,
            Err(error) => return (leaving.responder)(Err(error)),
        };
        // (The disk may have changed during the wait.)
        let checked = self.check_condition(&leaving.name, Some(index), &leaving.only_if);
        if let Err(error) = checked {
            return (leaving.responder)(Err(error));
        }
        match self.info(index).users() {
            None => self.close(index, leaving.responder),
            Some(_) if Instant::now() < leaving.until => self.leaving.push(leaving),
            Some(users) => {
                let name = leaving.name;
                let error = ErrorKind::Conflict.because(format!(
                    "disk '{name}': in use by {users}; unplug it there first, or remove it with \
                     --force"
                ));
                (leaving.responder)(Err(error));
            }
        }
    }

    /// Returns the time until the next check of disks that are to be removed. None: there are no
    /// such disks.
    pub(super) fn until_next_look(&self) -> Option<Duration> {
        (!self.leaving.is_empty()).then_some(LOOK)
    }

    fn close(&mut self, index: usize, responder: Responder) {
        let name = self.disks[index].name().to_owned();
        if let Some(error) = self.activities.busy(&name) {
            return responder(Err(error));
        }
        let close = match changes::close(self.mail.post()) {
            Ok(close) => close,
            Err(error) => {
                let text = format!("cannot start a thread: {}", cause(error));
                return responder(Err(ErrorKind::Failed.because(text)));
            }
        };
        let disk = self.disks.remove(index);
        let clients = self.nbd.as_ref().and_then(|nbd| nbd.remove(&disk));
        // (The thread waits for the clients.)
        let _ = close.send((disk, clients));
        self.activities.begin_to_close(&name, responder);
    }

    pub(super) fn on_closed(&mut self, name: &str, summary: Summary) {
        tracing::info!("disk '{name}': removed");
        let disk = name.to_owned();
        self.common.events.tell(Happened::Removed { disk });
        if let Some(responder) = self.activities.closed(name) {
            responder(Ok(summary.into()));
        }
    }

    /// Disconnects front-ends and clients, and waits for requests in flight, with a timeout.
    pub(super) fn end_all(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + self.stop_timeout.0;
        self.wait_for_changes(deadline);
        self.thaw_all();
        self.nbd.iter().for_each(Nbd::begin_stop);
        self.disks.iter().for_each(Served::begin_stop);
        let (mut ended, mut late) = (Ok(()), Vec::new());
        for disk in &mut self.disks {
            match disk.end(deadline) {
                Some(end) => ended = ended.and(end),
                None => late.push(format!("disk '{}'", disk.name())),
            }
        }
        if let Some(nbd) = &mut self.nbd {
            match nbd.end(deadline) {
                Some(end) => ended = end.and(ended),
                None => late.push(nbd.clients()),
            }
        }
        // (Disks that are being opened have no requests in flight.)
        self.wait_for_removals(deadline);
        let closing = self.activities.closing();
        late.extend(closing.map(|name| format!("disk '{name}'")));
        if late.is_empty() {
            let busy = |disk: &&Served| !disk.end_workers(deadline);
            let busy = self.disks.iter().filter(busy);
            late.extend(busy.map(|disk| format!("disk '{}'", disk.name())));
        }
        match late.is_empty() {
            true => ended,
            false => Err(Error::Abandoned {
                timeout: self.stop_timeout,
                whose: late.join(" and "),
            }),
        }
    }

    /// Waits until no disk is being changed, or until `deadline`.
    fn wait_for_changes(&mut self, deadline: Instant) {
        while self.activities.is_any_changing() && self.wait_for_event(deadline) {
            for event in self.mail.take() {
                self.on_event(event);
            }
        }
    }

    /// Waits until no disk is being removed, or until `deadline`.
    fn wait_for_removals(&mut self, deadline: Instant) {
        while self.activities.closing().next().is_some() && self.wait_for_event(deadline) {
            for event in self.mail.take() {
                if let Event::Closed(name, _) = event {
                    self.activities.closed(&name);
                }
            }
        }
    }

    /// Waits for an event. False: no event has arrived until `deadline`.
    fn wait_for_event(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
            return false;
        };
        let _ = poll(&mut [PollFd::new(&self.mail, PollFlags::IN)], Some(&left));
        true
    }
}
