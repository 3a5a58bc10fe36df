//! A connection's TLS session: encrypts and decrypts bytes, without socket I/O.

use fathom_units::cause;
use rustls::Connection;
use std::io::{ErrorKind, Read, Write};

/// Size of the receive buffer, and approximate limit of unsent encrypted data, in bytes.
const CHUNK: usize = 128 << 10;

/// The TLS session of one connection after its handshake.
pub struct Session {
    tls: Box<Connection>,
    /// Received bytes; those from `start` to `end` are not yet decrypted.
    received: Vec<u8>,
    start: usize,
    end: usize,
    /// Encrypted bytes; those before `sent` have been sent.
    encrypted: Vec<u8>,
    sent: usize,
    closed: bool,
}

/// Result of decrypting.
pub enum Opened {
    /// Number of decrypted bytes, at least 1.
    Bytes(usize),
    /// More bytes must be received first.
    Nothing,
    /// The peer has closed the session.
    End,
}

impl Session {
    /// Creates the session of a connection whose handshake is complete.
    pub fn new(tls: Box<Connection>) -> Session {
        Session {
            tls,
            received: vec![0; CHUNK],
            start: 0,
            end: 0,
            encrypted: Vec::new(),
            sent: 0,
            closed: false,
        }
    }

    /// Returns the buffer to receive into. `None` if it still contains received bytes.
    pub fn room(&mut self) -> Option<(*mut u8, usize)> {
        let all = (self.received.as_mut_ptr(), self.received.len());
        (self.start == self.end).then_some(all)
    }

    /// Records that `len` bytes were received into the buffer of [`Session::room`].
    pub fn received(&mut self, len: usize) {
        (self.start, self.end) = (0, len);
    }

    /// Decrypts received bytes into `to`, which must not be empty.
    pub fn open(&mut self, to: &mut [u8]) -> Result<Opened, String> {
        loop {
            match self.tls.reader().read(to) {
                Ok(0) => return Ok(Opened::End),
                Ok(len) => return Ok(Opened::Bytes(len)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("TLS: {}", cause(error))),
            }
            let mut rest = &self.received[self.start..self.end];
            if rest.is_empty() {
                return Ok(Opened::Nothing);
            }
            let read = self.tls.read_tls(&mut rest);
            self.start += read.map_err(|error| format!("TLS: {}", cause(error)))?;
            let processed = self.tls.process_new_packets();
            processed.map_err(|error| format!("TLS: {}", cause(error)))?;
        }
    }

    /// Returns whether all encrypted bytes have been sent.
    pub fn is_sent(&self) -> bool {
        self.sent == self.encrypted.len() && !self.tls.wants_write()
    }

    /// Returns whether more data should be encrypted before the next send.
    pub fn wants_more(&mut self) -> bool {
        if self.sent == self.encrypted.len() {
            self.encrypted.clear();
            self.sent = 0;
        }
        self.encrypted.len() < CHUNK
    }

    /// Encrypts the first part of `plain`, and returns its length in bytes.
    pub fn encrypt(&mut self, plain: &[u8]) -> Result<usize, String> {
        let some = &plain[..plain.len().min(CHUNK / 2)];
        let written = self.tls.writer().write(some);
        let written = written.map_err(|error| format!("TLS: {}", cause(error)))?;
        self.flush()?;
        Ok(written)
    }

    /// Appends the bytes that the session wants to send to the encrypted bytes.
    pub fn flush(&mut self) -> Result<(), String> {
        while self.tls.wants_write() {
            let written = self.tls.write_tls(&mut self.encrypted);
            written.map_err(|error| format!("TLS: {}", cause(error)))?;
        }
        Ok(())
    }

    /// Returns the encrypted bytes that have not been sent.
    pub fn to_send(&self) -> &[u8] {
        &self.encrypted[self.sent..]
    }

    /// Records that the first `bytes` bytes of [`Session::to_send`] have been sent.
    pub fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    /// Queues a close_notify alert, once. Returns false if the session was already closed.
    pub fn close(&mut self) -> bool {
        if !self.closed {
            self.tls.send_close_notify();
        }
        !std::mem::replace(&mut self.closed, true)
    }
}
