//! An attached source, as its worker keeps it.

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
    /// The peer has been asked to kick; until it does, there is no work.
    pub(crate) armed: bool,
    /// A kick was seen since the last pop.
    pub(crate) kicked: bool,
    /// Has answers that are not published.
    pub(crate) dirty: bool,
    /// The peer wants to be told of the answers just published.
    pub(crate) notify: bool,
    /// Does its own I/O: nobody kicks it.
    pub(crate) own_io: bool,
    /// Nothing more is popped: it is leaving, or its peer broke the rules.
    pub(crate) closed: bool,
    pub(crate) leaving: Option<SyncSender<Box<dyn Source>>>,
}

impl Slot {
    /// Whether there may be work that can be taken on.
    pub(crate) fn looks_open(&self) -> bool {
        !self.closed && self.in_flight < self.capacity
    }

    /// Leaving, with nothing in flight.
    pub(crate) fn is_drained(&self) -> bool {
        self.leaving.is_some() && self.in_flight == 0 && !self.dirty && self.source.has_stopped()
    }

    /// Replaces an eventfd of the source, whose requests stay in flight. Returns the previous one,
    /// which nobody watches or signals any more.
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
            // The last kick may have gone to the previous one.
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
