//! An attached source, as its worker keeps it.

use crate::counters::SourceCounters;
use crate::source::Source;
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

    pub(crate) fn disarm(&mut self) {
        if self.armed {
            self.source.disarm();
            self.armed = false;
        }
    }
}
