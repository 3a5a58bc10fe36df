//! Pauses clients, so that another process or this one can continue to serve them.

use super::connection::{Described, NbdSource, OnEnd, SourceState};
use super::export::{Export, InUse};
use super::peer::{self, Peer};
use super::server::{Entered, NbdServer, Shared};
use super::table::{Connection, Holding, Phase, ServedAt, Table};
use fathom_sockets::Descriptors;
use fathom_units::cause;
use parking_lot::MutexGuard;
use serde::{Deserialize, Serialize};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Saved state of a client. A list that accompanies the states of all clients contains their files,
/// in the same order.
#[derive(Debug, Serialize, Deserialize)]
pub struct ClientState {
    /// Name of the export.
    export: String,
    age_ms: u64,
    /// Number of the client's files in the list.
    files: usize,
    /// Index of the worker that served the client last.
    #[serde(default)]
    worker: usize,
    source: SourceState,
}

/// Channel that wakes a connection's thread.
pub(super) struct Wake {
    pub(super) sender: SyncSender<()>,
    pub(super) receiver: Receiver<()>,
}

impl Wake {
    pub(super) fn new() -> (Wake, OnEnd) {
        let (sender, receiver) = sync_channel(1);
        let on_end = sender.clone();
        let on_end = Box::new(move || {
            // A full channel means that the thread is already awake.
            let _ = on_end.try_send(());
        });
        (Wake { sender, receiver }, on_end)
    }

    /// Drops a pending wake-up whose cause is known. Must not be called while the connection is
    /// attached, since it may then have ended.
    pub(super) fn forget(&self) {
        let _ = self.receiver.try_recv();
    }
}

impl NbdServer {
    /// Holds all clients and accepts no others until [`NbdServer::go_on`]. On return no request is
    /// in flight, and no disk is in use.
    ///
    /// # Errors
    /// A sentence for the user if not all clients are held at `deadline`.
    pub fn hold(&self, deadline: Instant) -> Result<(), String> {
        self.keep_out();
        let mut table = self.shared.table();
        table.holding.all = true;
        self.shared.wait_until_held(table, deadline)
    }

    /// Resumes the held clients and accepts others.
    pub fn go_on(&self) {
        self.shared.table().holding.all = false;
        self.shared.changed.notify_all();
        self.let_in();
    }

    /// Holds the clients of one export, as [`NbdServer::hold`] does for all.
    pub fn hold_export(&self, export: &str, deadline: Instant) -> Result<(), String> {
        let mut table = self.shared.table();
        table.holding.exports.insert(export.to_owned());
        self.shared.wait_until_held(table, deadline)
    }

    /// Resumes the held clients of one export. With `other`, the export of the same name is
    /// replaced first.
    pub fn go_on_export(&self, export: &str, other: Option<Export>) {
        if let Some(other) = other {
            self.shared.exports.replace(other);
        }
        self.shared.table().holding.exports.remove(export);
        self.shared.changed.notify_all();
    }

    /// Describes the held clients for another process. Clients with TLS cannot be handed over; with
    /// `without_encrypted`, they are left out.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn describe(
        &self,
        without_encrypted: bool,
        files: &mut Descriptors,
    ) -> Result<Vec<ClientState>, String> {
        let mut table = self.shared.table();
        let mut clients = Vec::new();
        for connection in table.connections.values_mut().filter(|c| !c.ending) {
            let Phase::Held(export, described) = &mut connection.phase else {
                continue;
            };
            let taken = Err("already handed over".to_owned());
            let named = |problem| format!("NBD client {}: {problem}", connection.name);
            let described = std::mem::replace(&mut **described, taken).map_err(named)?;
            let (source, own) = match described {
                (Described::State(source), own) => (*source, own),
                (Described::Reconnects, _) => continue,
                (Described::Encrypted, _) if without_encrypted => continue,
                (Described::Encrypted, _) => {
                    return Err(named("connected by TLS".to_owned()));
                }
            };
            clients.push(ClientState {
                export: export.name().to_owned(),
                age_ms: connection.since.elapsed().as_millis() as u64,
                files: own.len(),
                worker: connection.served.map_or(0, |served| served.worker),
                source,
            });
            files.append(own);
        }
        Ok(clients)
    }

    /// Takes over clients from another process, which has released the disks. The clients are held.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn adopt(&self, clients: Vec<ClientState>, files: &mut Descriptors) -> Result<(), String> {
        self.keep_out();
        self.shared.table().holding.all = true;
        let adopt = |client| self.adopt_one(client, files);
        let activated = clients.into_iter().map(adopt);
        let activated = activated.collect::<Result<Vec<_>, String>>()?;
        activated.iter().try_for_each(|activated| {
            let gone = |_| "a client's thread has ended".to_owned();
            activated.recv().map_err(gone)?
        })
    }

    /// Takes over one client. The receiver yields whether its disk could be activated.
    fn adopt_one(
        &self,
        client: ClientState,
        files: &mut Descriptors,
    ) -> Result<Receiver<Result<(), String>>, String> {
        let all = self.shared.exports.all();
        let export = all
            .into_iter()
            .find(|export| export.name() == client.export);
        let export = export.ok_or_else(|| format!("no export '{}'", client.export))?;
        let (wake, on_end) = Wake::new();
        let limits = self.shared.options.limits;
        let mut own = files.split_off_front(client.files);
        let mut table = self.shared.table();
        let number = table.next as u16;
        let source = NbdSource::adopt(client.source, &mut own, limits, number, on_end)?;
        let now = Instant::now();
        let age = Duration::from_millis(client.age_ms);
        let number = table.add(Connection {
            name: peer::name(source.socket()),
            peer: Peer::of(source.socket()),
            since: now.checked_sub(age).unwrap_or(now),
            socket: Weak::new(),
            phase: Phase::Admitted(export.clone()),
            // Clients with TLS are not handed over.
            served: Some(ServedAt {
                worker: client.worker,
                encrypted: false,
            }),
            ending: false,
        });
        drop(table);
        let (done, activated) = sync_channel(1);
        let run = move |entered: &Entered| {
            let in_use = InUse::new(&export);
            let outcome = in_use.as_ref().map(drop).map_err(Clone::clone);
            let _ = done.send(outcome);
            if let Ok(in_use) = in_use {
                entered.live_on(in_use, Box::new(source), wake);
            }
        };
        let started = self.shared.entered(number).start(run);
        started.map_err(|error| format!("cannot start a client's thread: {}", cause(error)))?;
        Ok(activated)
    }
}

impl Shared {
    fn wait_until_held(
        &self,
        mut table: MutexGuard<'_, Table>,
        deadline: Instant,
    ) -> Result<(), String> {
        let Table {
            holding,
            connections,
            ..
        } = &mut *table;
        let all = connections.values_mut();
        all.filter(|c| is_busy(c, holding))
            .for_each(Connection::hold);
        let left = deadline.saturating_duration_since(Instant::now());
        let are_busy = |table: &mut Table| {
            let mut all = table.connections.values();
            all.any(|c| is_busy(c, &table.holding))
        };
        self.changed.wait_while_for(&mut table, are_busy, left);
        let mut all = table.connections.values();
        match all.find(|c| is_busy(c, &table.holding)) {
            None => Ok(()),
            Some(busy) => Err(format!("requests of NBD client {} do not end", busy.name)),
        }
    }

    /// Waits until the export is not held, and returns the export that then has its name.
    pub(super) fn wait_for_export(&self, export: &Arc<Export>) -> Option<Arc<Export>> {
        let is_held = |table: &mut Table| table.holding.has(export) && !table.stopping;
        self.changed.wait_while(&mut self.table(), is_held);
        self.exports.named(export.name())
    }
}

/// Returns true for a connection that is to be held, has a disk, and is not held yet.
fn is_busy(connection: &Connection, holding: &Holding) -> bool {
    match &connection.phase {
        Phase::Handshake | Phase::Held(..) => false,
        Phase::Admitted(export) | Phase::Served { export, .. } => holding.has(export),
    }
}

impl Entered {
    /// Serves an adopted client once it is not held any more.
    fn live_on(&self, in_use: InUse, mut source: Box<NbdSource>, wake: Wake) {
        if !self.wait_while_held(in_use.export()) {
            return;
        }
        source.go_on(&in_use.export().view());
        let name = in_use.export().name().to_owned();
        if let Err(error) = self.live(in_use, source, wake, false) {
            tracing::error!(
                "nbd: {}: cannot serve {name:?} any more, so the connection is closed: {}",
                self.name(),
                cause(error)
            );
        }
    }

    /// Waits until the connection may resume. Returns None if it must end.
    pub(super) fn stay_held(&self, export: &Arc<Export>, source: &NbdSource) -> Option<InUse> {
        let mut files = Descriptors::default();
        let described = source.describe(&mut files);
        let described = described.map(|described| (described, files));
        let mut table = self.shared.table();
        self.connection(&mut table).phase = Phase::Held(export.clone(), Box::new(described));
        self.shared.changed.notify_all();
        drop(table);
        let export = loop {
            if !self.wait_while_held(export) {
                return None;
            }
            // By now, another export may have the name,
            let export = self.shared.exports.named(export.name())?;
            let mut table = self.shared.table();
            // or the export may be held again.
            if !table.holding.has(&export) || table.stopping {
                self.connection(&mut table).phase = Phase::Admitted(export.clone());
                break export;
            }
        };
        let in_use = InUse::new(&export).inspect_err(|problem| {
            tracing::warn!(
                "nbd: {}: the connection is closed, because its disk is no longer served: \
                 {problem}",
                self.name()
            );
        });
        in_use.ok()
    }

    /// Waits while the export is held. Returns false if the connection must end.
    fn wait_while_held(&self, export: &Export) -> bool {
        let mut table = self.shared.table();
        let is_held = |table: &mut Table| {
            let holding = table.holding.has(export) && !table.stopping;
            holding && !self.connection(table).ending
        };
        self.shared.changed.wait_while(&mut table, is_held);
        !table.stopping && !self.connection(&mut table).ending
    }
}
