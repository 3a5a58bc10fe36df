//! Asking a running daemon.

use super::{Ask, Request};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a daemon did not do what it was asked; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{}: no daemon is listening there", .0.display())]
    NotRunning(PathBuf),
    #[error("{}: {what}: {source}", path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error("{}: the daemon has closed the connection", .0.display())]
    Closed(PathBuf),
    #[error("{}: it does not speak fathom's control protocol", .0.display())]
    NotFathom(PathBuf),
    /// The daemon's own words.
    #[error("{0}")]
    Refused(String),
}

/// How long an answer may take. The daemon answers at once unless it is
/// draining, or stopped.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// A connection to a daemon's control socket.
#[derive(Debug)]
pub struct Client {
    socket: BufReader<UnixStream>,
    path: PathBuf,
}

impl Client {
    pub fn connect(path: &Path) -> Result<Client, ClientError> {
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                ClientError::NotRunning(path.to_owned())
            }
            _ => ClientError::Io {
                path: path.to_owned(),
                what: "cannot connect",
                source,
            },
        };
        let socket = UnixStream::connect(path).map_err(failed)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        Ok(Client {
            socket: BufReader::new(socket),
            path: path.to_owned(),
        })
    }

    /// Ask about the daemon, or about its only disk, and wait for the answer.
    pub fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, ClientError> {
        self.ask_about(None, request)
    }

    /// Ask about a disk, and wait for the answer.
    pub fn ask_about<T: DeserializeOwned>(
        &mut self,
        disk: Option<&str>,
        request: &Request,
    ) -> Result<T, ClientError> {
        let ask = Ask {
            disk: disk.map(str::to_owned),
            request: request.clone(),
        };
        let line = ask.to_line().map_err(|error| {
            // A path that is not UTF-8.
            ClientError::Refused(format!("cannot be said in JSON: {error}"))
        })?;
        let patience = match request {
            // Storage takes its time; the daemon answers when it has given up.
            Request::Add { .. } | Request::Remove { .. } => None,
            _ => Some(PATIENCE),
        };
        let socket = self.socket.get_ref();
        let answer = socket.set_read_timeout(patience);
        let answer = answer.and_then(|()| self.exchange(&line));
        let answer = answer.map_err(|e| self.no_answer(e))?;
        let not_fathom = |_| ClientError::NotFathom(self.path.clone());
        let answer: Value = serde_json::from_str(&answer).map_err(not_fathom)?;
        if let Some(Value::String(error)) = answer.get("error") {
            return Err(ClientError::Refused(error.clone()));
        }
        serde_json::from_value(answer).map_err(not_fathom)
    }

    fn no_answer(&self, source: io::Error) -> ClientError {
        let path = self.path.clone();
        match source.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                ClientError::Closed(path)
            }
            _ => ClientError::Io {
                path,
                what: "no answer",
                source,
            },
        }
    }

    fn exchange(&mut self, line: &str) -> io::Result<String> {
        let mut socket = self.socket.get_ref();
        socket.write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        (&mut self.socket).take(MAX_ANSWER).read_line(&mut answer)?;
        if answer.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(answer)
    }
}
