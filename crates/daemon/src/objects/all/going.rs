//! Disks that go.

use super::{Objects, to_json};
use crate::answer::{Answer, Asker, Kind};
use crate::error::Error;
use crate::events::Happened;
use crate::objects::changes::{self, Changing, Event, Leaving, What};
use crate::objects::disk::{Origin, Served};
use crate::objects::nbd::Nbd;
use fathom_trace::Summary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

/// Who has just let go of a disk may be found here still: a disk that is to be removed has so long
/// to be out of use, and is looked at so often.
const LEAVE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

impl Objects {
    /// `forget`: its file is to go, too.
    pub(super) fn remove(&mut self, index: usize, force: bool, forget: bool, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        match force {
            true => self.close(index, forget, asker),
            false => self.leave(Leaving {
                name,
                forget,
                asker,
                until: Instant::now() + LEAVE,
            }),
        }
    }

    /// Remove it, if nobody uses it.
    pub(super) fn leave(&mut self, leaving: Leaving) {
        let index = match self.find(&leaving.name) {
            Ok(index) => index,
            Err(refusal) => return (leaving.asker)(Err(refusal)),
        };
        match self.info(index).users() {
            None => self.close(index, leaving.forget, leaving.asker),
            Some(_) if Instant::now() < leaving.until => self.leaving.push(leaving),
            Some(users) => {
                let name = leaving.name;
                let refusal = Kind::Conflict.because(format!(
                    "disk '{name}' is in use by {users}: unplug it there first, or force it"
                ));
                (leaving.asker)(Err(refusal));
            }
        }
    }

    /// How long [`Objects::turn`] can wait.
    pub fn patience(&self) -> Option<Duration> {
        let look = (!self.leaving.is_empty()).then_some(LOOK);
        look.into_iter().chain(self.resizing.patience()).min()
    }

    pub(super) fn close(&mut self, index: usize, forget: bool, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        if let Some(refusal) = self.resizing.in_the_way(&name) {
            return asker(Err(refusal));
        }
        let close = match changes::close(self.stop_timeout.0, self.mail.post()) {
            Ok(close) => close,
            Err(error) => {
                let text = format!("cannot start a thread: {error}");
                return asker(Err(Kind::Failed.because(text)));
            }
        };
        let disk = self.disks.remove(index);
        let forget = forget && matches!(disk.origin, Origin::Kept(_));
        let clients = self.nbd.as_ref().and_then(|nbd| nbd.remove(&disk));
        // It waits for that.
        let _ = close.send((disk, clients));
        self.changing.push(Changing {
            name,
            what: What::Removed { forget },
            waiting: Some(asker),
        });
    }

    pub(super) fn tell_late(&mut self, name: &str) {
        let text = format!(
            "disk '{name}' still has requests in flight after {}: it is removed as soon as they \
             have ended",
            self.stop_timeout
        );
        tracing::warn!("{text}");
        let change = self.changing.iter_mut().find(|one| one.name == name);
        if let Some(asker) = change.and_then(|change| change.waiting.take()) {
            asker(Err(Kind::Late.because(text)));
        }
    }

    pub(super) fn take_in_closed(&mut self, name: String, summary: Box<Summary>) {
        tracing::info!("disk '{name}' is removed");
        let disk = name.clone();
        self.common.events.tell(Happened::Removed { disk });
        let change = self.changing.iter_mut().find(|one| one.name == name);
        if let (Some(change), Some(keeper)) = (change, &self.keeper)
            && change.what == (What::Removed { forget: true })
        {
            change.what = What::Forgotten;
            let (post, done) = (self.mail.post(), name.clone());
            let done = move |outcome| post.send(Event::Forgotten(done, summary, outcome));
            return keeper.forget(name, Box::new(done));
        }
        self.end_change(&name, to_json(&summary));
    }

    pub(super) fn take_in_forgotten(
        &mut self,
        name: &str,
        summary: &Summary,
        outcome: Result<(), String>,
    ) {
        let answer = outcome.map_err(|problem| {
            tracing::error!("{problem}");
            let text = format!("disk '{name}' is removed until the server starts again: {problem}");
            Kind::Failed.because(text)
        });
        self.end_change(name, answer.and_then(|()| to_json(summary)));
    }

    fn end_change(&mut self, name: &str, answer: Answer) {
        if let Some(index) = self.changing.iter().position(|one| one.name == name)
            && let Some(asker) = self.changing.swap_remove(index).waiting
        {
            asker(answer);
        }
    }

    /// Let everybody go, and wait for what is in flight, if that does not take too long.
    pub fn stop(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + self.stop_timeout.0;
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
        // Of those that were just being opened nothing can be in flight.
        let drains = |change: &Changing| matches!(change.what, What::Removed { .. });
        self.changing.retain(drains);
        self.wait_for_removals(deadline);
        let changing = self.changing.iter();
        late.extend(changing.map(|change| format!("disk '{}'", change.name)));
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

    /// Until `deadline`.
    fn wait_for_removals(&mut self, deadline: Instant) {
        while !self.changing.is_empty() && self.wait_for_event(deadline) {
            for event in self.mail.take() {
                if let Event::Closed(name, _) = event {
                    self.changing.retain(|change| change.name != name);
                }
            }
        }
    }

    /// False: none has come until `deadline`.
    pub(super) fn wait_for_event(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
            return false;
        };
        let _ = poll(&mut [PollFd::new(&self.mail, PollFlags::IN)], Some(&left));
        true
    }
}
