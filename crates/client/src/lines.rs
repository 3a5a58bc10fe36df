//! What a server tells line by line.

use crate::error::ClientError;
use crate::server::Server;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The longest line, in bytes.
const MAX_LINE: usize = 64 << 20;

/// Of one call.
pub struct Lines<'a> {
    runtime: &'a Runtime,
    server: &'a Server,
    body: Incoming,
    /// What has come and was not given yet: the end of it is no whole line.
    buffer: Vec<u8>,
    /// So much of it has been looked at.
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

    /// The next one, without its end; None: there is none within that time.
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
