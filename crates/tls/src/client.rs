//! A client's side: whom it believes, and who it says that it is.

use super::files::{ClientFiles, Open, TlsError, read_certificates, read_key};
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::sync::Arc;

/// Reads the certificates of those whom a client believes, and, if they are there, its own certificate
/// and key, by which servers may know it.
pub fn client_config(files: &ClientFiles, open: Open<'_>) -> Result<Arc<ClientConfig>, TlsError> {
    let authorities = files.authorities.as_ref();
    let authorities = authorities.ok_or(TlsError::NoAuthorities)?;
    let mut roots = RootCertStore::empty();
    let certificates = read_certificates(authorities, open)?;
    // A system's store may have some that nobody can use.
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
    // Connections last: resuming sessions would save nothing.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// For all connections to one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl ClientTls {
    /// `server`: what its certificate must be for.
    pub fn load(files: &ClientFiles, server: &str, open: Open<'_>) -> Result<ClientTls, TlsError> {
        let name = ServerName::try_from(server.to_owned());
        Ok(ClientTls {
            server: name.map_err(|_| TlsError::BadName(server.to_owned()))?,
            config: client_config(files, open)?,
        })
    }

    /// For one more connection.
    pub fn session(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(self.config.clone(), self.server.clone())
    }
}
