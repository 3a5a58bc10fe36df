//! Errors of requests to a server.

use fathom_units::cause;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::time::Duration;

/// Kind of the problem in the replies of a server that is stopping.
const ENDING: &str = "urn:fathom:problem:ending";

/// An error of a request. The text is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens at this location.
    #[error("{0}: no server listens there; start one with 'fathom serve', or name another socket")]
    NotRunning(String),
    /// The user may not connect to the server at this location.
    #[error(
        "{0}: no permission to connect; use sudo, or start the server with an --api-group that has you"
    )]
    Denied(String),
    /// The connection cannot be established, or its TLS session fails.
    #[error("{server}: {what}: {}", cause(source))]
    Io {
        /// Location of the server.
        server: String,
        /// Description of the failure, such as `cannot connect`.
        what: &'static str,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The server at this location closed the connection before it replied.
    #[error("{0}: the server closed the connection; see its log")]
    Closed(String),
    /// The server did not reply before the timeout.
    #[error("{server}: no reply within {after:?}; the server may be busy or stopped")]
    Late {
        /// Location of the server.
        server: String,
        /// Timeout of the request.
        after: Duration,
    },
    /// The reply from this location is not that of a Fathom server.
    #[error("{0}: not a fathom server")]
    NotFathom(String),
    /// The server replied with an error: its text, the HTTP status, and the kind of the problem.
    #[error("{text}")]
    Refused {
        /// HTTP status. 400 if this client cannot express the request in JSON.
        status: u16,
        /// Type of the problem, a URN; empty if the reply has none.
        kind: String,
        /// Message for the user.
        text: String,
    },
}

impl ClientError {
    /// Whether the server has ended or is stopping.
    pub fn is_gone(&self) -> bool {
        match self {
            ClientError::NotRunning(_) | ClientError::Closed(_) => true,
            ClientError::Refused { kind, .. } => kind == ENDING,
            _ => false,
        }
    }

    /// Converts an error of connecting.
    pub(crate) fn of_connect(server: &impl Display, source: io::Error) -> ClientError {
        match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                ClientError::NotRunning(server.to_string())
            }
            ErrorKind::PermissionDenied => ClientError::Denied(server.to_string()),
            _ => ClientError::Io {
                server: server.to_string(),
                what: "cannot connect",
                source,
            },
        }
    }

    /// Converts an error of an established connection.
    pub(crate) fn of_connection(server: &impl Display, error: hyper::Error) -> ClientError {
        let inner = std::error::Error::source(&error);
        let inner = inner.and_then(|inner| inner.downcast_ref::<io::Error>());
        match inner {
            _ if error.is_parse() => ClientError::NotFathom(server.to_string()),
            // A server rejects a client's certificate by a TLS alert, which rustls reports as
            // `InvalidData`.
            Some(inner) if inner.kind() == ErrorKind::InvalidData => ClientError::Io {
                server: server.to_string(),
                what: "TLS",
                source: io::Error::new(inner.kind(), inner.to_string()),
            },
            _ => ClientError::Closed(server.to_string()),
        }
    }
}
