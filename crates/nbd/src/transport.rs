//! Sends and receives the bytes of a handshake before a deadline, with or without TLS.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::Connection;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// A connection during its handshake.
pub struct Transport {
    timed: Timed,
    tls: Option<Box<Connection>>,
}

impl Transport {
    /// Creates a transport without TLS. Reads and writes fail with `TimedOut` after `deadline`.
    pub fn new(socket: Arc<OwnedFd>, deadline: Instant) -> Transport {
        Transport {
            timed: Timed { socket, deadline },
            tls: None,
        }
    }

    /// Sets the deadline of later reads and writes.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.timed.deadline = deadline;
    }

    /// Returns whether the connection uses TLS.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Starts TLS, and returns when the TLS handshake is complete.
    pub fn encrypt(&mut self, session: impl Into<Connection>) -> io::Result<()> {
        let mut session = session.into();
        while session.is_handshaking() {
            let done = session.complete_io(&mut self.timed);
            if let Err(error) = done {
                // An alert tells the peer the reason, if it can still be sent.
                let _ = session.write_tls(&mut self.timed);
                return Err(error);
            }
        }
        // Sends session tickets.
        while session.wants_write() {
            session.write_tls(&mut self.timed)?;
        }
        self.tls = Some(Box::new(session));
        Ok(())
    }

    /// Returns the TLS session, for the code that continues with the socket.
    pub fn into_tls(self) -> Option<Box<Connection>> {
        self.tls
    }

    /// Sends a close_notify alert, if TLS is in use.
    pub fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            // The peer may have closed the connection already.
            let _ = tls.write_tls(&mut self.timed);
        }
    }
}

impl Read for Transport {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.timed.read(buf),
            Some(tls) => loop {
                match tls.reader().read(buf) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
                tls.complete_io(&mut self.timed)?;
            },
        }
    }
}

impl Write for Transport {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.timed.write(buf),
            Some(tls) => {
                let written = tls.writer().write(buf)?;
                while tls.wants_write() {
                    tls.write_tls(&mut self.timed)?;
                }
                Ok(written)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket whose reads and writes fail with `TimedOut` after a deadline.
struct Timed {
    socket: Arc<OwnedFd>,
    deadline: Instant,
}

impl Timed {
    fn wait(&self, events: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).expect("some seconds");
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), events)];
        match poll(&mut fds, Some(&left)) {
            // If the deadline has passed, the next check of the clock fails.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            // Checks the deadline before each read, so that a peer that sends single bytes cannot
            // extend it.
            if self.deadline <= Instant::now() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match recv(&self.socket, &mut *buf, RecvFlags::DONTWAIT) {
                Ok((n, _)) => return Ok(n),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            match send(&self.socket, buf, flags) {
                Ok(n) => return Ok(n),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
