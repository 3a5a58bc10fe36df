//! A client's side: whom it believes, and who it says that it is.

use super::files::{Open, TlsError, read_certificates, read_key};
use crate::uri::TlsTerms;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::sync::Arc;

/// For all connections to one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl ClientTls {
    /// Reads what the URI names: the certificates of those whom it believes, and, if they are there, its own
    /// certificate and key, by which the server may know it.
    pub fn load(terms: &TlsTerms, open: Open<'_>) -> Result<ClientTls, TlsError> {
        let server = ServerName::try_from(terms.server.clone());
        let server = server.map_err(|_| TlsError::BadName(terms.server.clone()))?;
        let files = terms.files();
        let authorities = files.authorities.ok_or(TlsError::NoAuthorities)?;
        let mut roots = RootCertStore::empty();
        let certificates = read_certificates(&authorities, open)?;
        // A system's store may have some that nobody can use.
        let (taken, _) = roots.add_parsable_certificates(certificates);
        if taken == 0 {
            let problem = "none of them has a form that is known here".into();
            let path = authorities;
            return Err(TlsError::BadCertificate { path, problem });
        }
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider knows TLS 1.2 and 1.3")
            .with_root_certificates(roots);
        let mut config = match files.own {
            Some((cert, key)) if open(&cert).is_ok() => {
                let chain = read_certificates(&cert, open)?;
                let pair = builder.with_client_auth_cert(chain, read_key(&key, open)?);
                pair.map_err(|error| TlsError::BadPair {
                    problem: error.to_string(),
                    cert,
                    key,
                })?
            }
            _ => builder.with_no_client_auth(),
        };
        // Connections last: resuming sessions would save nothing.
        config.resumption = Resumption::disabled();
        Ok(ClientTls {
            config: Arc::new(config),
            server,
        })
    }

    /// For one more connection.
    pub fn session(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(self.config.clone(), self.server.clone())
    }
}
