//! Certificates and keys in PEM format.

use fathom_units::cause;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::File;
use std::io::{self, BufReader, Read, Take};
use std::path::{Path, PathBuf};

/// Maximum number of bytes that are read of a file; a system's certificate store is shorter.
const MAX_FILE: u64 = 4 << 20;

/// Function that opens a file.
pub type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

/// Opens a file with the permissions of this process.
pub fn open_here(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Files that a client reads for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    /// Certificates of the trusted authorities. `None` if this system has none.
    pub authorities: Option<PathBuf>,
    /// The client's certificate and key, which are optional.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl ClientFiles {
    /// Returns the files of a directory laid out as for nbdkit and QEMU. Without a directory,
    /// returns the authorities that this system trusts.
    pub fn of(dir: Option<&Path>) -> ClientFiles {
        match dir {
            None => ClientFiles {
                authorities: openssl_probe::probe().cert_file,
                own: None,
            },
            Some(dir) => ClientFiles {
                authorities: Some(dir.join("ca-cert.pem")),
                own: Some((dir.join("client-cert.pem"), dir.join("client-key.pem"))),
            },
        }
    }

    /// Returns the paths of all files, the trusted authorities first.
    pub fn all(self) -> impl Iterator<Item = PathBuf> {
        let own = self.own.into_iter().flat_map(|(cert, key)| [cert, key]);
        self.authorities.into_iter().chain(own)
    }
}

/// Why TLS cannot be used; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or is not valid PEM.
    #[error("{}: cannot read the file: {}", path.display(), cause(source))]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: pem::Error,
    },
    /// The system has no certificates of trusted authorities.
    #[error(
        "no certificates of this system's authorities found; name a directory with ca-cert.pem \
         by tls-certificates=DIR"
    )]
    NoAuthorities,
    /// This text is not a name that a certificate can have.
    #[error(
        "'{0}' is not a name that a server's certificate can have; name the server by \
         tls-hostname=NAME"
    )]
    BadName(String),
    /// This file contains no certificate.
    #[error("{}: contains no certificate", .0.display())]
    NoCertificate(PathBuf),
    /// A file of trusted authorities cannot be used.
    #[error("{}: unusable certificate: {problem}", path.display())]
    BadCertificate {
        /// Path of the file.
        path: PathBuf,
        /// Reason, for the user.
        problem: String,
    },
    /// The certificate and the key do not belong together, or one of them is unsupported.
    #[error("certificate {} and key {} are unusable: {problem}", cert.display(), key.display())]
    BadPair {
        /// Path of the certificate.
        cert: PathBuf,
        /// Path of the key.
        key: PathBuf,
        /// Reason, for the user.
        problem: String,
    },
}

/// Reads all certificates of a file, at least one.
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

/// Reads the first key of a file.
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
