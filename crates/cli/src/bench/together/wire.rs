//! The protocol between an agent and its client: one JSON message per line, over TLS.

use super::terms::Terms;
use anyhow::{Context, bail};
use fathom_load::Report;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};

/// Maximum length of a line in bytes.
const MAX: u64 = 16 << 20;

/// The messages, in the order in which they are sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// Client: request to run this load.
    Load(Box<Terms>),
    /// Agent: the load can start, and the agent waits.
    Ready { target: String },
    /// Client: start now.
    Go,
    /// Agent: the immediate confirmation of `Go`.
    Going,
    /// Client: stop early.
    Stop,
    /// Agent: the result.
    Done(Box<Done>),
    /// Agent: an error, in place of any other message.
    Failed { problem: String },
}

/// The result of a load.
#[derive(Debug, Serialize, Deserialize)]
pub struct Done {
    pub report: Report,
    /// Microseconds from `Go` to the start of the load; `None` if the load ended before a check.
    pub began_us: Option<u64>,
}

/// A side of a connection.
pub struct Wire<S: Read + Write> {
    stream: BufReader<S>,
    /// The received part of an incomplete line.
    line: Vec<u8>,
}

impl<S: Read + Write> Wire<S> {
    pub fn new(stream: S) -> Wire<S> {
        Wire {
            stream: BufReader::new(stream),
            line: Vec::new(),
        }
    }

    pub fn stream(&self) -> &S {
        self.stream.get_ref()
    }

    pub fn send(&mut self, message: &Message) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let stream = self.stream.get_mut();
        stream
            .write_all(&line)
            .and_then(|()| stream.flush())
            .context("the connection was closed")
    }

    /// Returns the next message; fails if none arrives within the socket's timeout.
    pub fn receive(&mut self) -> anyhow::Result<Message> {
        self.try_receive()?.context("no reply")
    }

    /// Returns the next message, or `None` if none arrives within the socket's timeout.
    pub fn try_receive(&mut self) -> anyhow::Result<Option<Message>> {
        let room = MAX.saturating_sub(self.line.len() as u64);
        let read = (&mut self.stream)
            .take(room)
            .read_until(b'\n', &mut self.line);
        match read {
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                return Ok(None);
            }
            // The error of the TLS library does not help the user.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                bail!("the connection was closed")
            }
            Err(error) => return Err(error).context("the connection was closed"),
            Ok(_) if self.line.last() == Some(&b'\n') => {}
            Ok(_) if self.line.len() as u64 >= MAX => bail!("the message is too long"),
            Ok(_) => bail!("the connection was closed"),
        }
        let line = std::mem::take(&mut self.line);
        serde_json::from_slice(&line)
            .map(Some)
            .context("unknown message")
    }
}
