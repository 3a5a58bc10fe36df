//! The NBD clients of all disks.

use super::disk::Served;
use super::serving::Serving;
use fathom_core::ThreadKind;
use fathom_exports::NbdServer;
use fathom_exports::nbd::{ClientState, Exports, Leaving, Options, Tls, local_name};
use fathom_host::Error;
use fathom_host::options::{NbdOptions, TlsOptions};
use fathom_metrics::{ConnectionInfo, NbdInfo};
use fathom_sockets::{Bound, Descriptors, Listener, ListenerState};
use fathom_tls::TlsError;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// The NBD server and its listeners.
pub struct Nbd {
    serving: Serving<NbdServer>,
    addresses: Vec<String>,
    /// The listeners, which the serving thread owns.
    listeners: Weak<Vec<Listener>>,
    tls: bool,
    /// Whether every client must have a certificate.
    authenticates: bool,
}

impl Nbd {
    /// Serves the disks that have an export, to clients from `listeners`. Clients wait until
    /// [`Nbd::go_on`].
    pub fn start(
        options: &NbdOptions,
        listeners: Vec<Listener>,
        disks: &[Served],
    ) -> Result<Nbd, Error> {
        let list: Vec<_> = disks.iter().filter_map(Served::nbd_export).collect();
        if list.is_empty() && !disks.is_empty() {
            return Err(Error::Options(
                "--nbd: no disk is exported to NBD clients".into(),
            ));
        }
        let exports = Exports::new(list).map_err(|error| Error::Options(error.to_string()))?;
        let tls = options.tls.as_ref().map(load_tls).transpose()?;
        let has_tls = tls.is_some();
        let default = Options::default();
        let server_options = Options {
            tls,
            max_connections: options.max_connections.unwrap_or(default.max_connections),
            max_per_peer: options.max_per_peer,
            idle_timeout: options.idle_timeout,
            ..default
        };
        let failed = Error::io("cannot serve NBD clients");
        let server = Arc::new(NbdServer::new(exports, server_options).map_err(&failed)?);
        disks.iter().for_each(|disk| let_disconnect(disk, &server));
        let addresses = listeners.iter().map(local_name).collect::<Result<_, _>>();
        let addresses = addresses.map_err(&failed)?;
        let listeners = Arc::new(listeners);
        let weak = Arc::downgrade(&listeners);
        let serve = move |server: &NbdServer| server.serve(&listeners);
        server.keep_out();
        let kind = ThreadKind::NbdListener;
        let serving = Serving::start(kind, "nbd", server, serve, NbdServer::stop);
        Ok(Nbd {
            listeners: weak,
            serving: serving.map_err(failed)?,
            addresses,
            tls: has_tls,
            authenticates: options.tls.as_ref().is_some_and(TlsOptions::authenticates),
        })
    }

    pub fn server(&self) -> Arc<NbdServer> {
        self.serving.shared()
    }

    /// Exports a disk, if the disk has NBD options.
    pub fn add(&self, disk: &Served) -> Result<(), String> {
        let Some(export) = disk.nbd_export() else {
            return Ok(());
        };
        let server = self.serving.shared();
        server.add(export).map_err(|error| error.to_string())?;
        let_disconnect(disk, &server);
        Ok(())
    }

    /// Stops exporting a disk, without waiting for its clients.
    pub fn remove(&self, disk: &Served) -> Option<Leaving> {
        self.serving.export().remove(disk.export_name()?)
    }

    /// Stops accepting clients: new clients wait.
    pub fn keep_out(&self) {
        self.serving.export().keep_out();
    }

    /// Stops the connected clients, and returns their states: no client has requests in flight, or
    /// uses a disk. The error is for the user.
    pub fn hold(
        &self,
        deadline: Instant,
        without_encrypted: bool,
        files: &mut Descriptors,
    ) -> Result<Vec<ClientState>, String> {
        let server = self.serving.export();
        server.hold(deadline)?;
        server.describe(without_encrypted, files)
    }

    /// Takes over the stopped clients of a predecessor.
    pub fn adopt(&self, clients: Vec<ClientState>, files: &mut Descriptors) -> Result<(), String> {
        self.serving.export().adopt(clients, files)
    }

    /// Resumes stopped clients, and accepts new ones.
    pub fn go_on(&self) {
        self.serving.export().go_on();
    }

    /// Returns a client whose connection cannot be handed over because of TLS, if there is such a
    /// client.
    pub fn encrypted_client(&self) -> Option<String> {
        let clients = self.serving.export().connections().into_iter();
        let encrypted = clients.filter(|client| client.encrypted);
        encrypted.map(|client| client.peer).next()
    }

    /// Returns the listening sockets for a successor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<Vec<ListenerState>> {
        let listeners = self.listeners.upgrade().unwrap_or_default();
        listeners
            .iter()
            .map(|listener| listener.hand_over(files))
            .collect()
    }

    /// Takes ownership of the listening sockets of a predecessor.
    pub fn own(&self, bounds: Vec<Bound>) {
        let listeners = self.listeners.upgrade().unwrap_or_default();
        for (listener, bound) in listeners.iter().zip(bounds) {
            listener.own(bound);
        }
    }

    /// Returns the address of a TCP listener without client authentication, if there is such a
    /// listener. (The permissions of a Unix socket decide which processes may connect.)
    pub fn open_listener(&self) -> Option<String> {
        let is_open = |address: &&String| !self.authenticates && !address.starts_with("unix:");
        self.addresses.iter().find(is_open).cloned()
    }

    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    pub fn ended(&self) -> BorrowedFd<'_> {
        self.serving.ended()
    }

    pub fn begin_stop(&self) {
        self.serving.begin_stop();
    }

    /// Waits for the end of serving until `deadline`. None: serving has not ended.
    pub fn end(&mut self, deadline: Instant) -> Option<Result<(), Error>> {
        let ended = self.serving.end(deadline)?;
        Some(ended.map_err(Error::io("NBD clients are no longer served")))
    }

    /// Returns the exports of the connected clients, as text for errors.
    pub fn clients(&self) -> String {
        let connections = self.serving.export().connections().into_iter();
        let exports: BTreeSet<_> = connections.map(|connection| connection.export).collect();
        let exports: Vec<_> = exports.iter().map(|name| format!("'{name}'")).collect();
        match exports.is_empty() {
            true => "NBD clients".to_owned(),
            false => format!("NBD clients of {}", exports.join(", ")),
        }
    }

    /// Returns the state of the export with this name.
    pub fn info(&self, export: &str) -> NbdInfo {
        let connections = self.serving.export().connections().into_iter();
        let connections = connections.filter(|connection| connection.export == export);
        NbdInfo {
            addresses: self.addresses.clone(),
            tls: self.tls,
            export: export.to_owned(),
            connections: connections
                .map(|connection| ConnectionInfo {
                    client: connection.peer,
                    worker: connection.worker,
                    encrypted: connection.encrypted,
                    seconds: connection.since.elapsed().as_secs(),
                })
                .collect(),
        }
    }
}

/// Lets the disk disconnect its clients, which may be necessary when its front-end attaches or
/// detaches.
pub fn let_disconnect(disk: &Served, server: &Arc<NbdServer>) {
    let server = Arc::downgrade(server);
    let name = disk.export_name().unwrap_or_default().to_owned();
    disk.shared().add_disconnect(Box::new(move || {
        if let Some(server) = server.upgrade() {
            server.disconnect(&name);
        }
    }));
}

fn load_tls(options: &TlsOptions) -> Result<Tls, TlsError> {
    let file = |name: &str| options.certificates.join(name);
    let ca = options.verify_peer.then(|| file("ca-cert.pem"));
    let (cert, key) = (file("server-cert.pem"), file("server-key.pem"));
    Tls::load(options.mode, &cert, &key, ca.as_deref())
}
