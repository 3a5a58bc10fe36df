//! Certificates and keys, as PEM.

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::{Path, PathBuf};

/// Why there is no TLS; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: pem::Error },
    #[error("{}: has no certificate in it", .0.display())]
    NoCertificate(PathBuf),
    #[error("{}: a certificate in it cannot be used: {problem}", path.display())]
    BadCertificate { path: PathBuf, problem: String },
    #[error("the certificate in {} and the key in {} cannot be used: {problem}", cert.display(), key.display())]
    BadPair {
        cert: PathBuf,
        key: PathBuf,
        problem: String,
    },
}

/// All certificates of a file: one at least.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_file_iter(path).map_err(unreadable(path))?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(unreadable(path))?;
    match found.is_empty() {
        true => Err(TlsError::NoCertificate(path.to_owned())),
        false => Ok(found),
    }
}

/// The first key of a file.
pub fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(unreadable(path))
}

fn unreadable(path: &Path) -> impl Fn(pem::Error) -> TlsError {
    |source| TlsError::Unreadable {
        path: path.to_owned(),
        source,
    }
}
