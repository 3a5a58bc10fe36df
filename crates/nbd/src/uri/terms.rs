//! What a URI says of TLS: libnbd's words for it (nbd_set_uri_allow_tls(3) and those beside it).

use super::text::{decode, query_of};
use std::path::PathBuf;

/// Whom a client believes, and as whom it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsTerms {
    /// A directory laid out as for nbdkit and QEMU; none: the certificates of this system.
    pub certificates: Option<PathBuf>,
    /// What the server's certificate must be for.
    pub server: String,
}

/// Files of PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Of those whose word is taken for the server's; none: this system has none.
    pub authorities: Option<PathBuf>,
    /// The client's certificate and key, which need not be there.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl TlsTerms {
    pub(super) fn new(host: &str, query: &str) -> Result<TlsTerms, String> {
        let mut terms = TlsTerms {
            certificates: None,
            server: host.into(),
        };
        for (key, value) in query_of(query) {
            match key {
                "tls-certificates" => terms.certificates = Some(decode(value)?.into()),
                "tls-hostname" => terms.server = decode(value)?,
                "tls-verify-peer" if value == "true" => {}
                key if key.starts_with("tls-") => {
                    return Err(format!(
                        "{key}={value} is not supported here: servers are verified, by the \
                         certificates in tls-certificates=DIR or those of this system"
                    ));
                }
                _ => {}
            }
        }
        Ok(terms)
    }

    /// What is read to connect.
    pub fn files(&self) -> TlsFiles {
        match &self.certificates {
            None => TlsFiles {
                authorities: openssl_probe::probe().cert_file,
                own: None,
            },
            Some(dir) => TlsFiles {
                authorities: Some(dir.join("ca-cert.pem")),
                own: Some((dir.join("client-cert.pem"), dir.join("client-key.pem"))),
            },
        }
    }
}

impl TlsFiles {
    pub fn all(self) -> impl Iterator<Item = PathBuf> {
        let own = self.own.into_iter().flat_map(|(cert, key)| [cert, key]);
        self.authorities.into_iter().chain(own)
    }
}
