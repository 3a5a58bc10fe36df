//! The channels of a disk, and who of them has connections.

use super::endpoint::Connected;
use super::unflushed::Unflushed;
use fathom_nbd::protocol::Replies;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The channels and their connections. These are lost together: a server that is gone for one is gone for
/// all, and nobody may see the disk before what was written has been written again.
pub(super) struct Links {
    /// Counts how often connections have been made.
    pub(super) generation: u64,
    /// False: they are lost. Once all channels have let go, a thread looks for the server.
    pub(super) are_up: bool,
    /// That thread is at it.
    is_sought: bool,
    pub(super) members: Vec<Member>,
    next_member: u64,
    /// The disk's first connection, until a channel takes it.
    pub(super) first: Option<Connected>,
    /// Somebody waits for what has been written to become durable.
    pub(super) flush_is_wanted: bool,
    /// When the server was last found again, and the pause there would have been before the next attempt.
    pub(super) found: Option<(Instant, Duration)>,
    /// Of channels that have gone, or have let go of their connections.
    pub(super) logs: Vec<Unflushed>,
}

/// A channel.
pub(super) struct Member {
    number: u64,
    bell: Arc<OwnedFd>,
    /// It has connections, or is to fetch them.
    holds: bool,
    given: Option<Given>,
}

/// Connections for one channel.
pub(super) struct Given {
    pub(super) generation: u64,
    pub(super) connections: Vec<Connected>,
}

/// A channel's place among the others.
pub(super) struct Seat {
    number: u64,
    /// Signalled when the connections are lost, and when there are new ones.
    pub(super) bell: Arc<OwnedFd>,
}

/// A server that is lost so soon after it was found is not sought at once.
const SOON: Duration = Duration::from_secs(10);

impl Links {
    /// With the first connection, and no channel yet.
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

    /// One more channel, which has connections of this generation, or none yet.
    pub(super) fn add(&mut self, bell: Arc<OwnedFd>, has_connections: bool) -> Seat {
        let number = self.next_member;
        self.next_member += 1;
        self.members.push(Member {
            number,
            bell: bell.clone(),
            holds: has_connections,
            given: None,
        });
        Seat { number, bell }
    }

    /// The connections of this generation are of no more use. False: that is known.
    pub(super) fn lose(&mut self, generation: u64) -> bool {
        if !self.is_current(generation) {
            return false;
        }
        self.are_up = false;
        self.first = None;
        for member in &mut self.members {
            // Nobody has used these.
            member.holds &= member.given.take().is_none();
        }
        self.ring_all();
        true
    }

    /// A channel has no connections any more; `log`: what it has written. `leaves`: it ends. `flushed`: the last
    /// flush that has succeeded. True: it was the last one, and the server is to be looked for.
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

    /// New connections, if there are any for this channel.
    pub(super) fn fetch(&mut self, seat: &Seat) -> Option<Given> {
        self.member(seat)?.given.take()
    }

    pub(super) fn is_current(&self, generation: u64) -> bool {
        self.are_up && self.generation == generation
    }

    /// Have all channels look what there is.
    pub(super) fn ring_all(&self) {
        self.members.iter().for_each(|member| ring(&member.bell));
    }

    fn member(&mut self, seat: &Seat) -> Option<&mut Member> {
        self.members
            .iter_mut()
            .find(|member| member.number == seat.number)
    }

    /// The last pause, if the server was found only a moment ago.
    pub(super) fn hurry(&self) -> Option<Duration> {
        let found = self.found.filter(|(when, _)| when.elapsed() < SOON);
        found.map(|(_, pause)| pause)
    }

    /// All channels get new connections, one set each; what is left waits for the next one, or is not needed.
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
            ring(&member.bell);
        }
        sets.flatten().for_each(|one| one.part(replies));
    }
}

fn ring(bell: &OwnedFd) {
    // An eventfd's counter cannot overflow by ones.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
