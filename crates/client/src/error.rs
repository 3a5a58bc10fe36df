//! Why a server did not do what it was asked.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{}: no server is listening there", .0.display())]
    NotRunning(PathBuf),
    #[error("{}: {what}: {source}", path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error("{}: the server has closed the connection", .0.display())]
    Closed(PathBuf),
    #[error("{}: no answer within {seconds} s", path.display())]
    Late { path: PathBuf, seconds: u64 },
    #[error("{}: it does not speak fathom's API", .0.display())]
    NotFathom(PathBuf),
    /// The server's own words, and its HTTP status.
    #[error("{text}")]
    Refused { status: u16, text: String },
}

impl ClientError {
    /// The server is there no more, or about to end.
    pub fn is_gone(&self) -> bool {
        use ClientError::{Closed, NotRunning, Refused};
        matches!(
            self,
            NotRunning(_) | Closed(_) | Refused { status: 503, .. }
        )
    }

    /// Nobody could be reached.
    pub(crate) fn of_connect(path: &Path, source: io::Error) -> ClientError {
        let path = path.to_owned();
        match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => ClientError::NotRunning(path),
            _ => ClientError::Io {
                path,
                what: "cannot connect",
                source,
            },
        }
    }

    /// A connection has failed.
    pub(crate) fn of_connection(path: &Path, error: hyper::Error) -> ClientError {
        let path = path.to_owned();
        match error.is_parse() {
            true => ClientError::NotFathom(path),
            false => ClientError::Closed(path),
        }
    }
}
