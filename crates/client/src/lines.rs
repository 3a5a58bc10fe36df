//! Reads the lines that a server streams.

use crate::error::ClientError;
use crate::server::Server;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Maximum length of a line, in bytes.
const MAX_LINE: usize = 64 << 20;

/// The lines of one stream.
pub struct Lines<'a> {
    runtime: &'a Runtime,
    server: &'a Server,
    body: Incoming,
    /// Received bytes that have not been returned. The last line may be incomplete.
    buffer: Vec<u8>,
    /// Number of bytes at the start of the buffer that contain no newline.
    seen: usize,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(runtime: &'a Runtime, server: &'a Server, body: Incoming) -> Lines<'a> {
        Lines {
            runtime,
            server,
            body,
            buffer: Vec::new(),
            seen: 0,
        }
    }

    /// Waits for the next line, and returns it without the newline. None: no line arrived in time.
    pub fn next(&mut self, patience: Duration) -> Result<Option<Vec<u8>>, ClientError> {
        let until = tokio::time::Instant::now() + patience;
        loop {
            if let Some(at) = self.buffer[self.seen..].iter().position(|b| *b == b'\n') {
                let rest = self.buffer.split_off(self.seen + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.seen = 0;
                return Ok(Some(line));
            }
            self.seen = self.buffer.len();
            let runtime = self.runtime;
            let more =
                runtime.block_on(async { tokio::time::timeout_at(until, self.body.frame()).await });
            match more {
                Err(_) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    let data = frame.into_data().unwrap_or_default();
                    self.buffer.extend_from_slice(&data);
                }
                Ok(Some(Err(error))) => {
                    return Err(ClientError::of_connection(self.server, error));
                }
                Ok(None) => return Err(ClientError::Closed(self.server.to_string())),
            }
            if self.buffer.len() > MAX_LINE {
                return Err(ClientError::NotFathom(self.server.to_string()));
            }
        }
    }
}
