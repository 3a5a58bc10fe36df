//! Accepts clients and manages their connections.

use super::admission::Admission;
use super::connection::{Activity, Ending, Limits, NbdSource, Stream};
use super::export::{Export, Exports, InUse, SameName};
use super::handshake::{Agreement, Denied, Handshake, Host, Outcome};
use super::holding::Wake;
use super::peer;
use super::table::{Connection, Phase, ServedAt, Table};
use super::tls::Tls;
use crate::watch::Visit;
use fathom_core::{EventNotifier, ThreadKind, thread_starts};
use fathom_nbd::transport::Transport;
use fathom_sockets::Listener;
use fathom_units::cause;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time without accepting clients after accept(2) failed for lack of resources.
const ACCEPT_PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// Stack size in bytes of a connection's thread, which runs a handshake and then sleeps.
const STACK: usize = 256 << 10;

/// Minimum of the default limit on connections per peer.
pub const FEW: usize = 16;

/// How many times per idle timeout a connection is checked for idleness.
const IDLE_LOOKS: u32 = 8;

/// Options of an NBD server.
#[derive(Debug)]
pub struct Options {
    /// TLS configuration; None turns TLS off.
    pub tls: Option<Tls>,
    /// Limits of each connection.
    pub limits: Limits,
    /// Maximum number of connections, at least 1.
    pub max_connections: usize,
    /// Maximum number of connections per peer: a user, an address, or a virtual machine. None means
    /// half of `max_connections`, but at least [`FEW`]: one peer cannot keep out all others.
    pub max_per_peer: Option<usize>,
    /// Time without a request after which a connection is ended, checked a few times per timeout.
    /// None by default, since the disk of a virtual machine may be idle for days.
    pub idle_timeout: Option<Duration>,
    /// Timeout of the whole handshake.
    pub handshake_timeout: Duration,
}

impl Options {
    fn max_per_peer(&self) -> usize {
        let fair = || (self.max_connections / 2).max(FEW);
        self.max_per_peer.unwrap_or_else(fair)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            tls: None,
            limits: Limits::default(),
            max_connections: 256,
            max_per_peer: None,
            idle_timeout: None,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// A connection that is being served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The client: an address or a process.
    pub peer: String,
    /// Name of the export.
    pub export: String,
    /// Index of the worker among the disk's workers.
    pub worker: usize,
    /// Whether the connection uses TLS.
    pub encrypted: bool,
    /// Time at which the client connected.
    pub since: Instant,
}

/// Serves disks to NBD clients.
pub struct NbdServer {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) exports: Exports,
    pub(super) options: Options,
    stop: EventNotifier,
    table: Mutex<Table>,
    /// Signalled when a connection has ended or must end, or is held or released.
    pub(super) changed: Condvar,
    admission: Admission,
}

impl NbdServer {
    /// Creates a server. [`NbdServer::serve`] accepts clients. Fails if no eventfd can be created.
    pub fn new(exports: Exports, options: Options) -> io::Result<NbdServer> {
        Ok(NbdServer {
            shared: Arc::new(Shared {
                exports,
                options,
                stop: EventNotifier::new()?,
                table: Mutex::default(),
                changed: Condvar::new(),
                admission: Admission::default(),
            }),
        })
    }

    /// Serves clients until [`NbdServer::stop`]. Then ends all connections, each when nothing of it
    /// is in flight.
    ///
    /// Errors of clients are logged.
    ///
    /// # Errors
    /// An error of a listening socket or of poll(2).
    pub fn serve(&self, listeners: &[Listener]) -> io::Result<()> {
        let served = self.accept_clients(listeners);
        self.shared.end_all();
        served
    }

    /// Makes `serve` return, now and in later calls. Callable from any thread.
    pub fn stop(&self) {
        self.shared.admission.stop();
        self.shared.stop.notify();
    }

    /// Stops admitting clients: new ones wait. Existing clients stay.
    pub fn keep_out(&self) {
        self.shared.admission.hold();
    }

    /// Admits clients again.
    pub fn let_in(&self) {
        self.shared.admission.open();
    }

    /// Adds an export for clients that connect from now on.
    pub fn add(&self, export: Export) -> Result<(), SameName> {
        self.shared.exports.add(export)
    }

    /// Removes the export and ends its connections, each when nothing of it is in flight. Does not
    /// wait for them.
    pub fn remove(&self, export: &str) -> Option<Leaving> {
        let leaving = Leaving {
            export: self.shared.exports.remove(export)?,
            shared: self.shared.clone(),
        };
        let mut table = self.shared.table();
        let all = table.connections.values_mut();
        all.filter(|c| leaving.has(c)).for_each(Connection::end);
        self.shared.changed.notify_all();
        drop(table);
        Some(leaving)
    }

    /// Ends the connections to the export. Does not wait for them.
    pub fn disconnect(&self, export: &str) {
        let mut table = self.shared.table();
        let all = table.connections.values_mut();
        all.filter(|c| c.export().is_some_and(|e| e.name() == export))
            .for_each(Connection::end);
        self.shared.changed.notify_all();
    }

    /// Returns the served clients, oldest first. A client stays in the list while it is held, or
    /// moved to another disk of the same name.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        let table = self.shared.table();
        let all = table.connections.values();
        let served = all.filter_map(|connection| {
            let (export, served) = connection.export().zip(connection.served)?;
            Some(ConnectionInfo {
                peer: connection.name.clone(),
                export: export.name().to_owned(),
                worker: served.worker,
                encrypted: served.encrypted,
                since: connection.since,
            })
        });
        served.collect()
    }

    fn accept_clients(&self, listeners: &[Listener]) -> io::Result<()> {
        for listener in listeners {
            listener.set_nonblocking()?;
        }
        let mut pause = false;
        loop {
            let ready = self.wait(listeners, pause)?;
            if ready[0] {
                return Ok(());
            }
            pause = false;
            if !self.shared.admission.wait() {
                return Ok(());
            }
            for (listener, _) in listeners.iter().zip(&ready[1..]).filter(|(_, r)| **r) {
                pause |= !self.shared.accept(listener)?;
            }
        }
    }

    /// Waits for the stop signal and the listeners, and returns which of them are ready.
    fn wait(&self, listeners: &[Listener], pause: bool) -> io::Result<Vec<bool>> {
        let accept = match pause {
            true => PollFlags::empty(),
            false => PollFlags::IN,
        };
        let stop = PollFd::from_borrowed_fd(self.shared.stop.as_fd(), PollFlags::IN);
        let sockets = listeners
            .iter()
            .map(|l| PollFd::from_borrowed_fd(l.as_fd(), accept));
        let mut fds: Vec<_> = std::iter::once(stop).chain(sockets).collect();
        match poll(&mut fds, pause.then_some(&ACCEPT_PAUSE)) {
            Ok(_) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => Ok(vec![false; fds.len()]),
            Err(error) => Err(error.into()),
        }
    }
}

/// An export that has been removed and may still have clients.
pub struct Leaving {
    export: Arc<Export>,
    shared: Arc<Shared>,
}

impl Leaving {
    fn has(&self, connection: &Connection) -> bool {
        let export = connection.export();
        export.is_some_and(|export| Arc::ptr_eq(export, &self.export))
    }

    /// Waits until its clients are gone. Returns false if some are left at `deadline`.
    pub fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_used = |table: &mut Table| table.connections.values().any(|c| self.has(c));
        let (mut table, changed) = (self.shared.table(), &self.shared.changed);
        changed.wait_while_for(&mut table, is_used, left);
        !is_used(&mut table)
    }
}

impl Shared {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Accepts a client and starts its thread. Returns false if resources are lacking.
    fn accept(self: &Arc<Self>, listener: &Listener) -> io::Result<bool> {
        let socket = match listener.accept() {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(true),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                tracing::error!(
                    "nbd: cannot accept a connection, so clients wait: {}",
                    cause(error)
                );
                return Ok(false);
            }
            // accept(2): errors of the new connection's network.
            Err(error) if peer::is_network_error(error) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        peer::prepare(&socket);
        let socket = Arc::new(socket);
        let number = self.enter(&socket);
        let started = self.entered(number).start(|guard| guard.run(socket));
        if let Err(error) = started {
            tracing::error!(
                "nbd: cannot start a thread, so the connection is closed: {}",
                cause(error)
            );
            return Ok(false);
        }
        Ok(true)
    }

    fn enter(&self, socket: &Arc<OwnedFd>) -> u64 {
        let mut table = self.table();
        table.make_room();
        table.add(Connection {
            name: peer::name(socket),
            peer: peer::Peer::of(socket),
            since: Instant::now(),
            socket: Arc::downgrade(socket),
            phase: Phase::Handshake,
            served: None,
            ending: false,
        })
    }

    pub(super) fn entered(self: &Arc<Self>, number: u64) -> Entered {
        Entered {
            shared: self.clone(),
            number,
        }
    }

    /// Admits no new connections and waits until all existing ones have ended.
    fn end_all(&self) {
        let mut table = self.table();
        table.stopping = true;
        table.connections.values_mut().for_each(Connection::end);
        self.changed.notify_all();
        while !table.connections.is_empty() {
            self.changed.wait(&mut table);
        }
    }
}

/// A connection in the table; removed on drop.
pub(super) struct Entered {
    pub(super) shared: Arc<Shared>,
    number: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.shared.table().connections.remove(&self.number);
        self.shared.changed.notify_all();
    }
}

impl Host for Entered {
    fn exports(&self) -> &Exports {
        &self.shared.exports
    }

    fn tls(&self) -> Option<&Tls> {
        self.shared.options.tls.as_ref()
    }

    fn admit(&self, export: &Arc<Export>) -> Result<InUse, Denied> {
        if !self.shared.admission.wait() {
            return Err(Denied::Stopping);
        }
        let (admitted, export) = loop {
            let export = self.shared.wait_for_export(export);
            let export = export.ok_or(Denied::Stopping)?;
            match self.reserve(&export) {
                Ok(true) => break (Ok(()), export),
                // The export is held again.
                Ok(false) => {}
                Err(why) => break (Err(why), export),
            }
        };
        // Activation may take long.
        let in_use = |()| InUse::new(&export).map_err(Denied::NotNow);
        let admitted = admitted.and_then(in_use);
        admitted.inspect_err(|why| {
            // The client may choose another export, and does not count as a connection meanwhile.
            let mut table = self.shared.table();
            let connection = self.connection(&mut table);
            connection.phase = Phase::Handshake;
            if connection.ending {
                connection.end();
            }
            drop(table);
            tracing::warn!("nbd: {}: {:?} denied: {why}", self.name(), export.name());
        })
    }
}

impl Entered {
    /// Starts the connection's thread.
    pub(super) fn start(self, run: impl FnOnce(&Entered) + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("nbd connection".into());
        thread.stack_size(STACK).spawn(move || {
            thread_starts(ThreadKind::NbdConnection);
            run(&self);
        })?;
        Ok(())
    }

    pub(super) fn connection<'t>(&self, table: &'t mut Table) -> &'t mut Connection {
        let connection = table.connections.get_mut(&self.number);
        connection.expect("a connection is in the table until its end")
    }

    /// Reserves one of the limited number of connections. Returns false if the export is held and
    /// may soon be replaced.
    fn reserve(&self, export: &Arc<Export>) -> Result<bool, Denied> {
        let mut table = self.shared.table();
        // A thread that removes an export looks at the table afterwards.
        if !table.stopping && table.holding.has(export) {
            return Ok(false);
        }
        if table.stopping || !self.shared.exports.has(export) {
            return Err(Denied::Stopping);
        }
        let options = &self.shared.options;
        let peer = self.connection(&mut table).peer;
        let others = table.connections.iter().filter(|(n, _)| **n != self.number);
        let admitted = others.filter(|(_, c)| c.export().is_some());
        let peers: Vec<_> = admitted.map(|(_, c)| c.peer).collect();
        if peers.len() >= options.max_connections {
            let most = options.max_connections;
            let why = format!(
                "the server has {most} connections, which is the limit (--nbd-connections)"
            );
            return Err(Denied::NotNow(why));
        }
        let most = options.max_per_peer();
        if peers.iter().filter(|other| **other == peer).count() >= most {
            let why = format!(
                "{peer} has {most} connections, which is the limit (--nbd-connections-per-client)"
            );
            return Err(Denied::NotNow(why));
        }
        self.connection(&mut table).phase = Phase::Admitted(export.clone());
        Ok(true)
    }

    /// Returns true if the server wants the connection to end.
    fn is_ending(&self) -> bool {
        self.connection(&mut self.shared.table()).ending
    }

    pub(super) fn name(&self) -> String {
        self.connection(&mut self.shared.table()).name.clone()
    }

    /// Runs the connection from the handshake to its end.
    fn run(&self, socket: Arc<OwnedFd>) {
        let deadline = Instant::now() + self.shared.options.handshake_timeout;
        let transport = Transport::new(socket.clone(), deadline);
        let (outcome, transport) = Handshake::new(self, transport).run();
        let peer = self.name();
        match outcome {
            Ok(Outcome::Agreed(agreement)) => {
                let name = agreement.view.name.clone();
                if let Err(error) = self.serve(agreement, socket, transport) {
                    tracing::error!(
                        "nbd: {peer}: cannot serve {name:?}, so the connection is closed: {}",
                        cause(error)
                    );
                }
            }
            Ok(Outcome::Over) => tracing::debug!("nbd: {peer}: disconnected without a disk"),
            // The end was requested and has been logged; the socket failed because of it.
            Err(_) if self.is_ending() => {}
            Err(failure) => tracing::warn!(
                "nbd: {peer}: handshake failed, so the connection is closed: {failure}"
            ),
        }
    }

    fn serve(
        &self,
        agreement: Agreement,
        socket: Arc<OwnedFd>,
        transport: Transport,
    ) -> io::Result<()> {
        let tls = transport.into_tls();
        let stream = Stream {
            socket: Arc::into_inner(socket).expect("others have it in the handshake only"),
            tls,
            read_ahead: Vec::new(),
        };
        let (wake, on_end) = Wake::new();
        let mut source = NbdSource::new(
            stream,
            &agreement.view,
            agreement.agreed,
            self.shared.options.limits,
            self.number as u16,
            on_end,
        )?;
        if let Some(mover) = agreement.mover {
            source.tell_changes(mover);
        }
        self.delay(agreement.in_use.export().connect_delay());
        self.live(agreement.in_use, Box::new(source), wake, true)
    }

    /// Serves the connection until it has ended, and pauses it as often as it is held. `is_new`: it
    /// is not that of a predecessor, which has told of it already.
    pub(super) fn live(
        &self,
        in_use: InUse,
        mut source: Box<NbdSource>,
        wake: Wake,
        mut is_new: bool,
    ) -> io::Result<()> {
        let mut in_use = Some(in_use);
        while let Some(used) = in_use.take() {
            let export = used.export().clone();
            let (activity, encrypted) = (source.activity(), source.is_encrypted());
            wake.forget();
            let attached = export.attach(source)?;
            let served = ServedAt {
                worker: attached.worker,
                encrypted,
            };
            let phase = Phase::Served {
                export: export.clone(),
                wake: wake.sender.clone(),
                activity: activity.clone(),
            };
            self.now_served(phase, served);
            if std::mem::take(&mut is_new) {
                export.tell(Visit::Attached, &self.name());
            }
            if !self.sleep(&wake.receiver, &activity) {
                tracing::info!(
                    "nbd: {}: closed because of no request within --nbd-idle-timeout",
                    self.name()
                );
            }
            let detached = attached.detach().into_any().downcast::<NbdSource>();
            source = detached.expect("only connections are attached");
            drop(used); // Readers of the log find the disk released.
            if source.is_held() {
                in_use = self.stay_held(&export, &source);
                if let Some(used) = &in_use {
                    source.go_on(&used.export().view());
                    continue;
                }
            }
            export.tell(Visit::Detached, &self.name());
            self.tell_end(export.name(), &source);
        }
        Ok(())
    }

    /// Waits until the connection has ended or must end. Returns false if it was idle for too long.
    fn sleep(&self, woken: &Receiver<()>, activity: &Activity) -> bool {
        let Some(timeout) = self.shared.options.idle_timeout else {
            // Cannot fail, since the table holds a sender.
            let _ = woken.recv();
            return true;
        };
        let mut last = (activity.idle_after(), Instant::now());
        loop {
            match woken.recv_timeout(timeout / IDLE_LOOKS) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return true,
            }
            let now = activity.idle_after();
            if now.is_none() || now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() >= timeout {
                return false;
            }
        }
    }

    /// Makes the client wait for `delay`, or until the connection must end.
    fn delay(&self, delay: Duration) {
        if !delay.is_zero() {
            let is_wanted = |table: &mut Table| !self.connection(table).ending;
            let (mut table, changed) = (self.shared.table(), &self.shared.changed);
            changed.wait_while_for(&mut table, is_wanted, delay);
        }
    }

    fn now_served(&self, phase: Phase, served: ServedAt) {
        let mut table = self.shared.table();
        let holding = match &phase {
            Phase::Served { export, .. } => table.holding.has(export),
            _ => false,
        };
        let connection = self.connection(&mut table);
        connection.phase = phase;
        connection.served = Some(served);
        tracing::debug!("nbd: {}: connected", connection.name);
        if connection.ending {
            connection.end();
        } else if holding {
            connection.hold();
        }
    }

    fn tell_end(&self, export: &str, source: &NbdSource) {
        let (peer, answered) = (self.name(), source.answered());
        let ending = source.ending();
        let line = format!("nbd: {peer}: {export:?}: {ending}; {answered} requests completed");
        match ending {
            Ending::Failed(_) => tracing::warn!("{line}"),
            _ => tracing::info!("{line}"),
        }
    }
}
