//! TLS settings of a URI, by libnbd's parameters (nbd_set_uri_allow_tls(3) and related calls).

use super::text::{decode, query_of};
use fathom_tls::ClientFiles;
use std::path::PathBuf;

/// The authorities that a client trusts, and the server that it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsTerms {
    /// A directory laid out as for nbdkit and QEMU. `None` uses the certificates of this system.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must be for.
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

    /// Returns the files that a client reads to connect.
    pub fn files(&self) -> ClientFiles {
        ClientFiles::of(self.certificates.as_deref())
    }
}
