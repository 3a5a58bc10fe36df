//! Options of the API.

use crate::rights::Groups;
use fathom_spec::SocketSpec;
use std::path::PathBuf;

/// Where the API listens, and for whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiOptions {
    /// The Unix socket. None: the path of [`entry_of`](fathom_client::place::entry_of), for the
    /// server's user alone.
    pub socket: Option<SocketSpec>,
    /// Groups that may use the API in addition to root and the server's user.
    pub groups: Groups,
    /// An address (host:port) at which every client may read metrics.
    pub http: Option<String>,
    /// The listener for clients on other hosts.
    pub remote: Option<RemoteOptions>,
}

/// The listener for clients on other hosts, which may read everything by TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Address: host:port.
    pub listen: String,
    /// Directory with server-cert.pem, server-key.pem, and ca-cert.pem, which must have signed
    /// clients' certificates.
    pub certificates: PathBuf,
}

impl RemoteOptions {
    /// Combines two options, which must both be given, or neither.
    pub fn of(
        listen: Option<String>,
        certificates: Option<PathBuf>,
    ) -> Result<Option<RemoteOptions>, String> {
        match (listen, certificates) {
            (Some(listen), Some(certificates)) => Ok(Some(RemoteOptions {
                listen,
                certificates,
            })),
            (None, None) => Ok(None),
            (Some(_), None) => Err("an address for other hosts needs certificates; add \
                --api-certificates (tls-certificates of [api])"
                .into()),
            (None, Some(_)) => Err("certificates for other hosts need an address; add \
                --api-listen (listen of [api])"
                .into()),
        }
    }
}
