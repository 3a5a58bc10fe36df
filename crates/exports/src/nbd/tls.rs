//! TLS configuration: certificates, and whether clients must use TLS.

use fathom_tls::{TlsError, server_config};
use rustls::{ServerConfig, ServerConnection};
use std::path::Path;
use std::sync::Arc;

/// Which clients must use TLS (proto.md, "Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// TLS is optional (SELECTIVETLS, without exports that demand it).
    On,
    /// All clients must use TLS (FORCEDTLS).
    Require,
}

/// The server's side of TLS.
#[derive(Debug)]
pub struct Tls {
    mode: Mode,
    config: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the server's certificate, followed by its intermediate certificates, and its key. With
    /// `client_ca`, clients need a certificate signed by one of its CAs. All files are PEM.
    pub fn load(
        mode: Mode,
        cert: &Path,
        key: &Path,
        client_ca: Option<&Path>,
    ) -> Result<Tls, TlsError> {
        Ok(Tls {
            mode,
            config: server_config(cert, key, client_ca)?,
        })
    }

    /// Returns which clients must use TLS.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Creates the TLS session of one connection.
    pub(super) fn session(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.config.clone())
    }
}
