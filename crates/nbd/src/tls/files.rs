//! Certificates and keys, as PEM.

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::File;
use std::io::{self, BufReader, Read, Take};
use std::path::{Path, PathBuf};

/// All certificates of a system are shorter than this.
const MAX_FILE: u64 = 4 << 20;

/// How a file is opened.
pub type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

/// With the rights of this process.
pub fn open_here(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Why there is no TLS; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: pem::Error },
    #[error(
        "no certificates of this system's are found: name a directory with ca-cert.pem by tls-certificates=DIR"
    )]
    NoAuthorities,
    #[error(
        "'{0}' is no name that a server's certificate could have: say which by tls-hostname=NAME"
    )]
    BadName(String),
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
pub fn read_certificates(
    path: &Path,
    open: Open<'_>,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = opened(path, open)?;
    let found = CertificateDer::pem_reader_iter(file);
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(unreadable(path))?;
    match found.is_empty() {
        true => Err(TlsError::NoCertificate(path.to_owned())),
        false => Ok(found),
    }
}

/// The first key of a file.
pub fn read_key(path: &Path, open: Open<'_>) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_reader(opened(path, open)?).map_err(unreadable(path))
}

fn opened(path: &Path, open: Open<'_>) -> Result<BufReader<Take<File>>, TlsError> {
    let file = open(path).map_err(|error| unreadable(path)(pem::Error::Io(error)))?;
    Ok(BufReader::new(file.take(MAX_FILE)))
}

fn unreadable(path: &Path) -> impl Fn(pem::Error) -> TlsError {
    |source| TlsError::Unreadable {
        path: path.to_owned(),
        source,
    }
}
