//! The server and its export, to which a disk connects repeatedly.

use super::connect::{dial_server, load_tls};
use super::rules::{Context, Tells};
use fathom_core::DiskError;
use fathom_nbd::NbdUri;
use fathom_nbd::client::{Export, Wishes, handshake, handshake_by_tls};
use fathom_nbd::protocol::{Replies, RequestHeader, command};
use fathom_nbd::transport::Transport;
use fathom_tls::{ClientTls, Session};
use fathom_units::cause;
use rustix::net::{SendFlags, send};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Endpoint {
    uri: NbdUri,
    tls: Option<ClientTls>,
    /// Metadata context to negotiate.
    context: String,
    /// Timeout for connecting, and for the handshake.
    patience: Duration,
}

impl Endpoint {
    pub(super) fn new(
        uri: &NbdUri,
        context: String,
        patience: Duration,
    ) -> Result<Endpoint, DiskError> {
        let tls = load_tls(uri).map_err(|error| DiskError::Unusable {
            path: PathBuf::from(uri.as_str()),
            problem: error.to_string(),
        })?;
        Ok(Endpoint {
            uri: uri.clone(),
            tls,
            context,
            patience,
        })
    }

    pub(super) fn uri(&self) -> &NbdUri {
        &self.uri
    }

    pub(super) fn name(&self) -> PathBuf {
        PathBuf::from(self.uri.as_str())
    }

    pub(super) fn unusable(&self, problem: impl Into<String>) -> DiskError {
        DiskError::Unusable {
            path: self.name(),
            problem: problem.into(),
        }
    }

    /// Connects and negotiates the export; blocking.
    pub(super) fn connect(&self) -> Result<(Greeted, Export), DiskError> {
        let deadline = Instant::now() + self.patience;
        let socket = dial_server(&self.uri, deadline).map_err(|source| DiskError::Io {
            path: self.name(),
            what: "cannot connect",
            source,
        })?;
        let socket = Arc::new(socket);
        // The handshake gets the full time again: the server may have been slow to accept because
        // of another disk.
        let deadline = Instant::now() + self.patience;
        let mut transport = Transport::new(socket.clone(), deadline);
        let wishes = Wishes {
            export: self.uri.export(),
            replies: &[Replies::Extended, Replies::Structured],
            context: Some(&self.context),
        };
        let export = match &self.tls {
            None => handshake(&mut transport, &wishes),
            Some(tls) => {
                let session = tls.session();
                let session =
                    session.map_err(|error| self.unusable(format!("TLS: {}", cause(error))))?;
                handshake_by_tls(&mut transport, session, &wishes)
            }
        };
        let export = export.map_err(|refusal| self.unusable(refusal.0))?;
        let greeted = Greeted {
            transport,
            socket,
            context: export.context.map(|id| Context {
                id,
                tells: Tells::of(&self.context),
            }),
        };
        Ok((greeted, export))
    }
}

/// A connection after the handshake, for blocking use.
pub(super) struct Greeted {
    pub(super) transport: Transport,
    pub(super) socket: Arc<OwnedFd>,
    context: Option<Context>,
}

impl Greeted {
    /// Converts the connection for use by a worker.
    pub(super) fn ready(self) -> Connected {
        let tls = self.transport.into_tls();
        Connected {
            socket: Arc::into_inner(self.socket).expect("the transport is gone"),
            tls: tls.map(Session::new),
            context: self.context,
        }
    }
}

/// Sends NBD_CMD_DISC, without which servers take the end for a failure. No command must have been
/// sent partly.
pub(super) fn say_goodbye(socket: &OwnedFd, tls: Option<&mut Session>, replies: Replies) {
    let mut goodbye = Vec::with_capacity(RequestHeader::EXTENDED_LEN);
    let header = RequestHeader {
        flags: 0,
        command: command::DISC,
        cookie: 0,
        offset: 0,
        len: 0,
    };
    header.put(replies, &mut goodbye);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let Some(tls) = tls else {
        let _ = send(socket, &goodbye, flags);
        return;
    };
    let encrypted = tls.encrypt(&goodbye);
    tls.close();
    if encrypted.and_then(|_| tls.flush()).is_ok() {
        let _ = send(socket, tls.to_send(), flags);
    }
}

/// A connection that no channel uses yet.
pub(super) struct Connected {
    pub(super) socket: OwnedFd,
    pub(super) tls: Option<Session>,
    /// Metadata context that the server offers, if any.
    pub(super) context: Option<Context>,
}

impl Connected {
    /// Ends an unused connection politely.
    pub(super) fn part(mut self, replies: Replies) {
        say_goodbye(&self.socket, self.tls.as_mut(), replies);
    }
}

/// Returns the error for a channel that cannot be started.
pub(super) fn cannot_start(endpoint: &Endpoint, source: io::Error) -> DiskError {
    DiskError::Io {
        path: endpoint.name(),
        what: "cannot start a worker's channel",
        source,
    }
}
