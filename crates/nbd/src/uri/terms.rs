//! What a URI says of TLS: libnbd's words for it (nbd_set_uri_allow_tls(3) and those beside it).

use super::text::{decode, query_of};
use fathom_tls::ClientFiles;
use std::path::PathBuf;

/// Whom a client believes, and as whom it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsTerms {
    /// A directory laid out as for nbdkit and QEMU; none: the certificates of this system.
    pub certificates: Option<PathBuf>,
    /// What the server's certificate must be for.
    pub server: String,
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
    pub fn files(&self) -> ClientFiles {
        ClientFiles::of(self.certificates.as_deref())
    }
}
