//! Client side: the authorities that a client trusts, and its own certificate.

use super::files::{ClientFiles, Open, TlsError, read_certificates, read_key};
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::sync::Arc;

/// Reads the certificates of the authorities that a client trusts.
///
/// Also reads the client's own certificate and key, if the certificate can be opened. Servers
/// identify the client by this certificate.
pub fn client_config(files: &ClientFiles, open: Open<'_>) -> Result<Arc<ClientConfig>, TlsError> {
    let authorities = files.authorities.as_ref();
    let authorities = authorities.ok_or(TlsError::NoAuthorities)?;
    let mut roots = RootCertStore::empty();
    let certificates = read_certificates(authorities, open)?;
    // The system's store may contain certificates that rustls cannot parse.
    let (taken, _) = roots.add_parsable_certificates(certificates);
    if taken == 0 {
        let problem = "none of them has a form that is known here".into();
        let path = authorities.clone();
        return Err(TlsError::BadCertificate { path, problem });
    }
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3")
        .with_root_certificates(roots);
    let mut config = match &files.own {
        Some((cert, key)) if open(cert).is_ok() => {
            let chain = read_certificates(cert, open)?;
            let pair = builder.with_client_auth_cert(chain, read_key(key, open)?);
            pair.map_err(|error| TlsError::BadPair {
                problem: error.to_string(),
                cert: cert.clone(),
                key: key.clone(),
            })?
        }
        _ => builder.with_no_client_auth(),
    };
    // Connections are long-lived, so resuming sessions would save nothing.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// TLS settings for all connections to one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl ClientTls {
    /// Loads the settings. `server` is the name that the server's certificate must be for.
    pub fn load(files: &ClientFiles, server: &str, open: Open<'_>) -> Result<ClientTls, TlsError> {
        let name = ServerName::try_from(server.to_owned());
        Ok(ClientTls {
            server: name.map_err(|_| TlsError::BadName(server.to_owned()))?,
            config: client_config(files, open)?,
        })
    }

    /// Starts the session of one connection.
    pub fn session(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(self.config.clone(), self.server.clone())
    }
}
