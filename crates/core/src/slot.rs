//! A worker's state of an attached source.

use crate::counters::SourceCounters;
use crate::engine::Engine;
use crate::source::{Eventfd, Source, SourceId};
use crate::token::Token;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// An attached source.
pub(crate) struct Slot {
    pub(crate) source: Box<dyn Source>,
    pub(crate) generation: u32,
    pub(crate) in_flight: usize,
    pub(crate) counters: Arc<SourceCounters>,
    pub(crate) capacity: usize,
    /// The peer was asked to kick; there is no work until it does.
    pub(crate) armed: bool,
    /// A kick has arrived since the last pop.
    pub(crate) kicked: bool,
    /// Some replies are not published yet.
    pub(crate) dirty: bool,
    /// The peer wants a notification for the replies just published.
    pub(crate) notify: bool,
    /// The source does its own I/O and has no kick eventfd.
    pub(crate) own_io: bool,
    /// No more requests are popped: the source is leaving, or its peer violated the protocol.
    pub(crate) closed: bool,
    pub(crate) leaving: Option<SyncSender<Box<dyn Source>>>,
}

impl Slot {
    /// Returns whether the source may have work that the worker can accept.
    pub(crate) fn looks_open(&self) -> bool {
        !self.closed && self.in_flight < self.capacity
    }

    /// Returns whether the source is leaving and has nothing in flight.
    pub(crate) fn is_drained(&self) -> bool {
        self.leaving.is_some() && self.in_flight == 0 && !self.dirty && self.source.has_stopped()
    }

    /// Replaces an eventfd of the source; its requests stay in flight. Returns the previous
    /// eventfd, which is no longer watched or signalled.
    pub(crate) fn set_eventfd(
        &mut self,
        engine: &mut dyn Engine,
        id: SourceId,
        which: Eventfd,
        fd: Option<OwnedFd>,
    ) -> io::Result<Option<OwnedFd>> {
        assert_eq!(self.generation, id.generation, "it was detached before");
        if which == Eventfd::Kick
            && let Some(fd) = &fd
        {
            let token = Token::kick(id.slot, id.generation);
            engine.watch(fd.as_raw_fd(), token)?;
            if let Some(previous) = self.source.kick_fd() {
                engine.unwatch(previous, token);
            }
            // The last kick may have gone to the previous eventfd.
            self.kicked = true;
        }
        Ok(self.source.set_eventfd(which, fd))
    }

    pub(crate) fn disarm(&mut self) {
        if self.armed {
            self.source.disarm();
            self.armed = false;
        }
    }
}
