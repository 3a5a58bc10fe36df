//! Table of a server's connections and their phases.

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

/// Maximum number of connections in the handshake. A further connection replaces an old one, so
/// that clients that hang do not keep others out.
const MAX_HANDSHAKES: usize = 64;
/// All connections by number; older connections have smaller numbers.
#[derive(Default)]
pub struct Table {
    pub next: u64,
    pub stopping: bool,
    pub holding: Holding,
    pub connections: BTreeMap<u64, Connection>,
}

/// Which connections are to be held.
#[derive(Default)]
pub struct Holding {
    pub all: bool,
    /// Names of the exports whose connections are to be held.
    pub exports: BTreeSet<String>,
}

impl Holding {
    pub fn has(&self, export: &Export) -> bool {
        self.all || self.exports.contains(export.name())
    }
}

pub struct Connection {
    /// Name of the client for users.
    pub name: String,
    pub peer: Peer,
    pub since: Instant,
    /// The socket, which the connection's thread owns.
    pub socket: Weak<OwnedFd>,
    pub phase: Phase,
    /// Where the client was served last; `None` before the first time. While a client moves to
    /// another disk or process, lists show this value.
    pub served: Option<ServedAt>,
    /// The connection must end as soon as possible.
    pub ending: bool,
}

/// How and where a client is served.
#[derive(Clone, Copy)]
pub struct ServedAt {
    /// Index of the worker among the disk's workers.
    pub worker: usize,
    pub encrypted: bool,
}

pub enum Phase {
    Handshake,
    /// The disk is activated, or is being activated.
    Admitted(Arc<Export>),
    Served {
        export: Arc<Export>,
        wake: SyncSender<()>,
        activity: Arc<Activity>,
    },
    /// No request is in flight and the disk is not in use; another process may take over the
    /// connection.
    Held(Arc<Export>, Box<HeldState>),
}

/// The state that another process needs to take over a connection, or why it cannot.
pub type HeldState = Result<(Described, Descriptors), String>;

impl Connection {
    /// Ends the connection, now or when its thread reaches the next phase.
    pub fn end(&mut self) {
        self.ending = true;
        match &self.phase {
            Phase::Handshake => {
                // The handshake may already be over.
                let socket = self.socket.upgrade();
                let _ = socket.map(|socket| shutdown(&socket, Shutdown::Both));
            }
            Phase::Admitted(_) | Phase::Held(..) => {}
            Phase::Served { wake, .. } => {
                // A full channel means that the thread is already awake.
                let _ = wake.try_send(());
            }
        }
    }

    /// Requests that the connection be held, if it is served.
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
    /// Adds a connection and returns its number.
    pub fn add(&mut self, connection: Connection) -> u64 {
        let number = self.next;
        self.next += 1;
        self.connections.insert(number, connection);
        number
    }

    /// Makes room for a connection in the handshake. If there are too many, ends the oldest one of
    /// the peer that has the most.
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
                // The oldest connection is its peer's only one.
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
        // Connection 1 is already ending and does not count.
        table.make_room();
        assert_eq!(ending(&table), [1]);
    }
}
