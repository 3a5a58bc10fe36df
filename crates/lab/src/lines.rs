//! Lines over a Unix socket with deadlines, for QMP and for the guest's agent.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};

const CHUNK: usize = 64 << 10;
/// Maximum length of a line in bytes, which bounds memory if a peer never sends a line end.
const LINE_LIMIT: usize = 64 << 20;

/// A connected socket that is read line by line.
#[derive(Debug)]
pub struct LineStream {
    stream: UnixStream,
    pending: Vec<u8>,
    /// Bytes of `pending` known to hold no line end, so that long lines are not searched again.
    searched: usize,
}

impl LineStream {
    /// Wraps a connected socket.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            pending: Vec::new(),
            searched: 0,
        }
    }

    /// Connects. Retries until the socket exists and accepts the connection.
    ///
    /// # Errors
    /// When no connection is accepted before the deadline.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => return Ok(Self::new(stream)),
                Err(source) if Instant::now() >= deadline => {
                    let what = format!("cannot connect to {}", path.display());
                    return Err(Error::Io { what, source });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Returns the socket, for bytes that are not lines.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Shuts the connection down in both directions.
    ///
    /// # Errors
    /// When the connection is already closed.
    pub fn hang_up(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Both)
    }

    /// Sends one line and appends the line end.
    ///
    /// # Errors
    /// When the peer has closed the connection, or accepts no bytes for a minute.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let what = || "cannot send a line".to_owned();
        self.stream
            .set_write_timeout(Some(Duration::from_secs(60)))
            .context(what)?;
        self.stream
            .write_all(format!("{line}\n").as_bytes())
            .context(what)
    }

    /// Returns the next line, or `None` if the deadline passes first.
    ///
    /// # Errors
    /// When the peer closes the connection or sends a line longer than [`LINE_LIMIT`].
    pub fn receive(&mut self, deadline: Instant) -> Result<Option<String>> {
        loop {
            if let Some(line) = self.take_line() {
                return Ok(Some(line));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.fill(left)?;
        }
    }

    fn take_line(&mut self) -> Option<String> {
        let end = self.pending[self.searched..]
            .iter()
            .position(|&b| b == b'\n');
        let Some(end) = end else {
            self.searched = self.pending.len();
            return None;
        };
        let line: Vec<u8> = self.pending.drain(..=self.searched + end).collect();
        self.searched = 0;
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    fn fill(&mut self, left: Duration) -> Result<()> {
        let what = || "cannot receive a line".to_owned();
        self.stream.set_read_timeout(Some(left)).context(what)?;
        let mut chunk = vec![0; CHUNK];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(Error::Protocol("the connection was closed".into())),
            Ok(_) if self.pending.len() > LINE_LIMIT => {
                Err(Error::Protocol("a line without an end".into()))
            }
            Ok(n) => {
                self.pending.extend_from_slice(&chunk[..n]);
                Ok(())
            }
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(())
            }
            Err(source) => Err(Error::Io {
                what: what(),
                source,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_testing::PATIENCE;
    use std::os::unix::net::UnixListener;

    fn pair() -> (LineStream, UnixStream) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let lines = LineStream::connect(&path, PATIENCE).unwrap();
        (lines, listener.accept().unwrap().0)
    }

    #[test]
    fn lines_survive_being_cut_anywhere() {
        let (mut lines, mut peer) = pair();
        peer.write_all(b"one\ntw").unwrap();
        let later = Instant::now() + PATIENCE;
        assert_eq!(lines.receive(later).unwrap().as_deref(), Some("one"));
        let soon = Instant::now() + Duration::from_millis(30);
        assert_eq!(lines.receive(soon).unwrap(), None);
        peer.write_all(b"o\r\n\nthree\n").unwrap();
        assert_eq!(lines.receive(later).unwrap().as_deref(), Some("two"));
        assert_eq!(lines.receive(later).unwrap().as_deref(), Some(""));
        assert_eq!(lines.receive(later).unwrap().as_deref(), Some("three"));
    }

    #[test]
    fn a_hang_up_is_an_error() {
        let (mut lines, peer) = pair();
        drop(peer);
        assert!(lines.receive(Instant::now() + PATIENCE).is_err());
    }
}
