//! Server side: the server's certificate, and the clients that it accepts.

use super::files::{TlsError, open_here, read_certificates, read_key};
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;

/// Reads the server's certificate and key, all in PEM format. The intermediate certificates follow
/// the server's certificate in its file.
///
/// With `client_ca`, only clients with a certificate signed by one of these authorities may
/// connect.
pub fn server_config(
    cert: &Path,
    key: &Path,
    client_ca: Option<&Path>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3");
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let bad = |problem: &dyn ToString| TlsError::BadCertificate {
                path: path.to_owned(),
                problem: problem.to_string(),
            };
            let mut roots = RootCertStore::empty();
            for certificate in read_certificates(path, &open_here)? {
                roots.add(certificate).map_err(|e| bad(&e))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(|e| bad(&e))?)
        }
    };
    let chain = read_certificates(cert, &open_here)?;
    let config = builder.with_single_cert(chain, read_key(key, &open_here)?);
    let mut config = config.map_err(|error| TlsError::BadPair {
        cert: cert.to_owned(),
        key: key.to_owned(),
        problem: error.to_string(),
    })?;
    // Connections are long-lived, so resuming sessions would save nothing.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
