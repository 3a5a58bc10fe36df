//! What TLS needs: certificates, and whether clients must use it.

use fathom_tls::{TlsError, server_config};
use rustls::{ServerConfig, ServerConnection};
use std::path::Path;
use std::sync::Arc;

/// Who must use TLS (proto.md, "Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Who wants to (SELECTIVETLS, without exports that demand it).
    On,
    /// All clients (FORCEDTLS).
    Require,
}

/// The server's side of TLS.
#[derive(Debug)]
pub struct Tls {
    mode: Mode,
    config: Arc<ServerConfig>,
}

impl Tls {
    /// Read the server's certificate (with those that vouch for it behind it)
    /// and key; with `client_ca`, only clients whose certificate one of these
    /// has signed may connect. All files are PEM.
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

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// For one more connection.
    pub(super) fn session(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.config.clone())
    }
}
