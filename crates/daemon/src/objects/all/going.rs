//! Disks that go.

use super::Objects;
use crate::error::Error;
use crate::objects::changes::{self, Event, Leaving};
use crate::objects::disk::Served;
use crate::objects::nbd::Nbd;
use crate::reply::Asker;
use fathom_control::{Condition, ErrorKind};
use fathom_metrics::Happened;
use fathom_trace::Summary;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

/// Who has just let go of a disk may be found here still: a disk that is to be removed has so long
/// to be out of use, and is looked at so often.
const LEAVE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

impl Objects {
    pub(super) fn remove(&mut self, index: usize, force: bool, only_if: Condition, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        if let Err(refusal) = self.check_condition(&name, Some(index), &only_if) {
            return asker(Err(refusal));
        }
        match force {
            true => self.close(index, asker),
            false => self.leave(Leaving {
                name,
                asker,
                until: Instant::now() + LEAVE,
                only_if,
            }),
        }
    }

    /// Remove it, if nobody uses it.
    pub(super) fn leave(&mut self, leaving: Leaving) {
        let index = match self.find(&leaving.name) {
            Ok(index) => index,
            Err(refusal) => return (leaving.asker)(Err(refusal)),
        };
        // (The disk may have been changed while it was waited for.)
        let checked = self.check_condition(&leaving.name, Some(index), &leaving.only_if);
        if let Err(refusal) = checked {
            return (leaving.asker)(Err(refusal));
        }
        match self.info(index).users() {
            None => self.close(index, leaving.asker),
            Some(_) if Instant::now() < leaving.until => self.leaving.push(leaving),
            Some(users) => {
                let name = leaving.name;
                let refusal = ErrorKind::Conflict.because(format!(
                    "disk '{name}': in use by {users}; unplug it there first, or remove it with \
                     --force"
                ));
                (leaving.asker)(Err(refusal));
            }
        }
    }

    /// None: there is nobody to look after.
    pub(super) fn until_next_look(&self) -> Option<Duration> {
        (!self.leaving.is_empty()).then_some(LOOK)
    }

    fn close(&mut self, index: usize, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        if let Some(refusal) = self.activities.busy(&name) {
            return asker(Err(refusal));
        }
        let close = match changes::close(self.mail.post()) {
            Ok(close) => close,
            Err(error) => {
                let text = format!("cannot start a thread: {}", cause(error));
                return asker(Err(ErrorKind::Failed.because(text)));
            }
        };
        let disk = self.disks.remove(index);
        let clients = self.nbd.as_ref().and_then(|nbd| nbd.remove(&disk));
        // It waits for that.
        let _ = close.send((disk, clients));
        self.activities.begin_to_close(&name, asker);
    }

    pub(super) fn take_in_closed(&mut self, name: &str, summary: Summary) {
        tracing::info!("disk '{name}': removed");
        let disk = name.to_owned();
        self.common.events.tell(Happened::Removed { disk });
        if let Some(asker) = self.activities.closed(name) {
            asker(Ok(summary.into()));
        }
    }

    /// Let everybody go, and wait for what is in flight, if that does not take too long.
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
        // (Of disks that are being opened nothing can be in flight.)
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

    /// Until `deadline`. What a disk is served by is known then.
    fn wait_for_changes(&mut self, deadline: Instant) {
        while self.activities.is_any_changing() && self.wait_for_event(deadline) {
            for event in self.mail.take() {
                self.take_in(event);
            }
        }
    }

    /// Until `deadline`.
    fn wait_for_removals(&mut self, deadline: Instant) {
        while self.activities.closing().next().is_some() && self.wait_for_event(deadline) {
            for event in self.mail.take() {
                if let Event::Closed(name, _) = event {
                    self.activities.closed(&name);
                }
            }
        }
    }

    /// False: none has come until `deadline`.
    fn wait_for_event(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
            return false;
        };
        let _ = poll(&mut [PollFd::new(&self.mail, PollFlags::IN)], Some(&left));
        true
    }
}
