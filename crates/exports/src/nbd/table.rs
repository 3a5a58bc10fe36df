//! The connections of a server, and what they are doing.

use super::connection::{Activity, Described};
use super::export::Export;
use super::peer::Peer;
use fathom_sockets::Descriptors;
use rustix::net::{Shutdown, shutdown};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Connections in their handshake. One more takes the place of the oldest of
/// them, so that clients which hang keep nobody out.
const MAX_HANDSHAKES: usize = 64;
/// All connections, by number: the older, the smaller.
#[derive(Default)]
pub struct Table {
    pub next: u64,
    pub stopping: bool,
    pub holding: Holding,
    pub connections: BTreeMap<u64, Connection>,
}

/// Which of those that are served are to be held.
#[derive(Default)]
pub struct Holding {
    pub all: bool,
    /// By the names of their exports.
    pub exports: BTreeSet<String>,
}

impl Holding {
    pub fn has(&self, export: &Export) -> bool {
        self.all || self.exports.contains(export.name())
    }
}

pub struct Connection {
    /// For people.
    pub name: String,
    pub peer: Peer,
    pub since: Instant,
    /// Its thread has it.
    pub socket: Weak<OwnedFd>,
    pub phase: Phase,
    /// Where the client was served last; `None` before the first time. A client that is carried over
    /// to another disk or process is listed by this until it is served again.
    pub served: Option<ServedAt>,
    /// It is to end as soon as it can.
    pub ending: bool,
}

/// How a client is served.
#[derive(Clone, Copy)]
pub struct ServedAt {
    /// The number of the worker among its disk's.
    pub worker: usize,
    pub encrypted: bool,
}

pub enum Phase {
    Handshake,
    /// The disk is in use, or is just being taken into use.
    Admitted(Arc<Export>),
    Served {
        export: Arc<Export>,
        wake: SyncSender<()>,
        activity: Arc<Activity>,
    },
    /// Nothing of it is in flight, nor is the disk in use; for another process.
    Held(Arc<Export>, Box<HeldState>),
}

/// What another process needs to go on with a connection, or why it cannot.
pub type HeldState = Result<(Described, Descriptors), String>;

impl Connection {
    /// End it, now or when it gets there.
    pub fn end(&mut self) {
        self.ending = true;
        match &self.phase {
            Phase::Handshake => {
                // It may be over already.
                let socket = self.socket.upgrade();
                let _ = socket.map(|socket| shutdown(&socket, Shutdown::Both));
            }
            Phase::Admitted(_) | Phase::Held(..) => {}
            Phase::Served { wake, .. } => {
                // If there is something in the channel, it is awake.
                let _ = wake.try_send(());
            }
        }
    }

    /// Have it held, if it is served.
    pub fn hold(&mut self) {
        if let Phase::Served { wake, activity, .. } = &self.phase {
            activity.hold(true);
            let _ = wake.try_send(());
        }
    }

    pub fn export(&self) -> Option<&Arc<Export>> {
        match &self.phase {
            Phase::Handshake => None,
            Phase::Admitted(export) | Phase::Served { export, .. } | Phase::Held(export, _) => {
                Some(export)
            }
        }
    }
}

impl Table {
    /// Its number.
    pub fn add(&mut self, connection: Connection) -> u64 {
        let number = self.next;
        self.next += 1;
        self.connections.insert(number, connection);
        number
    }

    /// For one more connection in its handshake: if there are too many, the
    /// oldest of the peer that has the most is ended.
    pub fn make_room(&mut self) {
        let in_handshake = |c: &&mut Connection| !c.ending && matches!(c.phase, Phase::Handshake);
        let mut peers = BTreeMap::new();
        for connection in self.connections.values_mut().filter(in_handshake) {
            *peers.entry(connection.peer).or_insert(0) += 1;
        }
        if peers.values().sum::<usize>() < MAX_HANDSHAKES {
            return;
        }
        let most = peers.into_iter().max_by_key(|(_, count)| *count);
        let all = self.connections.values_mut().filter(in_handshake);
        let mut theirs = all.filter(|c| most.is_some_and(|(peer, _)| c.peer == peer));
        if let Some(oldest) = theirs.next() {
            tracing::warn!(
                "nbd: {}: closed during its handshake to admit a newer client",
                oldest.name
            );
            oldest.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_those_with_the_most_handshakes_gives_way() {
        let mut table = Table::default();
        for number in 0..MAX_HANDSHAKES as u64 {
            let connection = Connection {
                name: number.to_string(),
                // The very oldest is alone.
                peer: Peer::User(u32::from(number > 0)),
                since: Instant::now(),
                socket: Weak::new(),
                phase: Phase::Handshake,
                served: None,
                ending: false,
            };
            table.connections.insert(number, connection);
        }
        let ending = |table: &Table| -> Vec<u64> {
            let all = table.connections.iter();
            all.filter(|(_, c)| c.ending).map(|(n, _)| *n).collect()
        };
        table.make_room();
        assert_eq!(ending(&table), [1]);
        // It is out of the way already.
        table.make_room();
        assert_eq!(ending(&table), [1]);
    }
}
