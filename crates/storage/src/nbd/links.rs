//! The channels of a disk, and their connections.

use super::endpoint::Connected;
use super::unflushed::Unflushed;
use fathom_core::EventNotifier;
use fathom_nbd::protocol::Replies;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The channels and their connections. Connections are lost together: a server that is gone for one
/// channel is gone for all, and no channel may use the disk before the unflushed writes have been
/// sent again.
pub(super) struct Links {
    /// Number of times connections have been made.
    pub(super) generation: u64,
    /// Whether the connections are usable. If not, a thread reconnects once all channels have
    /// released theirs.
    pub(super) are_up: bool,
    /// Whether that thread is running.
    is_sought: bool,
    pub(super) members: Vec<Member>,
    next_member: u64,
    /// The disk's first connection, until a channel takes it.
    pub(super) first: Option<Connected>,
    /// Whether a thread waits for completed writes to become durable.
    pub(super) flush_is_wanted: bool,
    /// Time of the last reconnection, and the pause before the attempt that would have followed.
    pub(super) found: Option<(Instant, Duration)>,
    /// Kept writes of channels that have ended or have released their connections.
    pub(super) logs: Vec<Unflushed>,
}

/// A channel.
pub(super) struct Member {
    number: u64,
    notifier: Arc<EventNotifier>,
    /// Whether the channel has connections, or is to fetch them.
    holds: bool,
    given: Option<Given>,
}

/// Connections for one channel.
pub(super) struct Given {
    pub(super) generation: u64,
    pub(super) connections: Vec<Connected>,
}

/// A channel's membership in the links.
pub(super) struct Seat {
    number: u64,
    /// Signalled when the connections are lost, when there are new ones, and when this channel has
    /// to flush.
    pub(super) notifier: Arc<EventNotifier>,
}

/// Time after a reconnection within which a new loss is followed by a pause.
const SOON: Duration = Duration::from_secs(10);

impl Links {
    /// Makes the links with the first connection and no channel.
    pub(super) fn new(first: Connected) -> Links {
        Links {
            generation: 0,
            are_up: true,
            is_sought: false,
            members: Vec::new(),
            next_member: 0,
            first: Some(first),
            flush_is_wanted: false,
            found: None,
            logs: Vec::new(),
        }
    }

    /// Adds a channel, which has connections of this generation or none yet.
    pub(super) fn add(&mut self, notifier: Arc<EventNotifier>, has_connections: bool) -> Seat {
        let number = self.next_member;
        self.next_member += 1;
        self.members.push(Member {
            number,
            notifier: notifier.clone(),
            holds: has_connections,
            given: None,
        });
        Seat { number, notifier }
    }

    /// Marks the connections of this generation as lost. Returns false if that is known.
    pub(super) fn lose(&mut self, generation: u64) -> bool {
        if !self.is_current(generation) {
            return false;
        }
        self.are_up = false;
        self.first = None;
        for member in &mut self.members {
            // No channel has used these connections yet.
            member.holds &= member.given.take().is_none();
        }
        self.ring_all();
        true
    }

    /// Records that a channel has released its connections; `log` has its kept writes. `leaves`:
    /// the channel ends. `flushed`: the last flush that has succeeded. Returns true if it was the
    /// last channel, so that the caller must start reconnecting.
    pub(super) fn let_go(
        &mut self,
        seat: &Seat,
        log: Unflushed,
        leaves: bool,
        flushed: u64,
    ) -> bool {
        self.logs.push(log);
        self.logs.iter_mut().for_each(|log| log.trim(flushed));
        self.logs.retain(|log| !log.is_empty());
        if let Some(member) = self.member(seat) {
            member.holds = false;
            member.given = None;
        }
        let holds = self.members.iter().any(|member| member.holds);
        let was_last = !self.are_up && !self.is_sought && !holds;
        self.is_sought |= was_last;
        if leaves {
            self.members.retain(|member| member.number != seat.number);
        }
        was_last
    }

    /// Takes the new connections of this channel, if there are any.
    pub(super) fn fetch(&mut self, seat: &Seat) -> Option<Given> {
        self.member(seat)?.given.take()
    }

    pub(super) fn is_current(&self, generation: u64) -> bool {
        self.are_up && self.generation == generation
    }

    /// Wakes all channels to check their state.
    pub(super) fn ring_all(&self) {
        self.members
            .iter()
            .for_each(|member| member.notifier.notify());
    }

    fn member(&mut self, seat: &Seat) -> Option<&mut Member> {
        self.members
            .iter_mut()
            .find(|member| member.number == seat.number)
    }

    /// Returns the last pause, if the server was found only a moment ago.
    pub(super) fn hurry(&self) -> Option<Duration> {
        let found = self.found.filter(|(when, _)| when.elapsed() < SOON);
        found.map(|(_, pause)| pause)
    }

    /// Gives each channel a set of new connections. `first` is kept for the next channel, and
    /// surplus sets are closed.
    pub(super) fn give(
        &mut self,
        sets: Vec<Vec<Connected>>,
        first: Option<Connected>,
        replies: Replies,
    ) {
        self.generation += 1;
        (self.are_up, self.is_sought) = (true, false);
        self.first = first;
        let mut sets = sets.into_iter();
        for (member, connections) in self.members.iter_mut().zip(&mut sets) {
            member.holds = true;
            member.given = Some(Given {
                generation: self.generation,
                connections,
            });
            member.notifier.notify();
        }
        sets.flatten().for_each(|one| one.part(replies));
    }
}
