//! What an agent and its client say to each other: a line of JSON each, by TLS.

use super::terms::Terms;
use anyhow::{Context, bail};
use fathom_load::Report;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};

/// Of a line, in bytes.
const MAX: u64 = 16 << 20;

/// In this order, unless something fails.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// The client's: this load is wanted.
    Load(Box<Terms>),
    /// The agent's: all is well, and it waits.
    Ready { target: String },
    /// The client's: now.
    Go,
    /// The agent's, at once.
    Going,
    /// The client's: end early.
    Stop,
    /// The agent's.
    Done(Box<Done>),
    /// The agent's, instead of any of these.
    Failed { problem: String },
}

/// What came of a load.
#[derive(Debug, Serialize, Deserialize)]
pub struct Done {
    pub report: Report,
    /// How long after `Go` it began, in microseconds; None: it was over before anybody looked.
    pub began_us: Option<u64>,
}

/// One side.
pub struct Wire<S: Read + Write> {
    stream: BufReader<S>,
    /// What has come of a line that is not whole yet.
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

    /// The next one, which must come within the socket's time.
    pub fn receive(&mut self) -> anyhow::Result<Message> {
        self.try_receive()?.context("no reply")
    }

    /// The same; None: it has not come within the socket's time.
    pub fn try_receive(&mut self) -> anyhow::Result<Option<Message>> {
        let room = MAX.saturating_sub(self.line.len() as u64);
        let read = (&mut self.stream)
            .take(room)
            .read_until(b'\n', &mut self.line);
        match read {
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                return Ok(None);
            }
            // (By what TLS adds to that, nobody is helped.)
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
