//! The bytes of a handshake: each before one deadline, by TLS or not.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::Connection;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// A connection whose handshake is going on.
pub struct Transport {
    timed: Timed,
    tls: Option<Box<Connection>>,
}

impl Transport {
    pub fn new(socket: Arc<OwnedFd>, deadline: Instant) -> Transport {
        Transport {
            timed: Timed { socket, deadline },
            tls: None,
        }
    }

    /// For what is read and written from now on.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.timed.deadline = deadline;
    }

    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// From now on everything goes by TLS. Returns when both sides know.
    pub fn encrypt(&mut self, session: impl Into<Connection>) -> io::Result<()> {
        let mut session = session.into();
        while session.is_handshaking() {
            let done = session.complete_io(&mut self.timed);
            if let Err(error) = done {
                // An alert tells the client why, if it can still be sent.
                let _ = session.write_tls(&mut self.timed);
                return Err(error);
            }
        }
        // Tickets for later sessions.
        while session.wants_write() {
            session.write_tls(&mut self.timed)?;
        }
        self.tls = Some(Box::new(session));
        Ok(())
    }

    /// The session, for whoever goes on with the socket.
    pub fn into_tls(self) -> Option<Box<Connection>> {
        self.tls
    }

    /// Say by TLS, if it is there, that nothing more will come.
    pub fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            // Its peer may have gone.
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

/// A socket that is waited for until a moment and no longer.
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
            // If the time is over, the next look at the clock will say so.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            // A peer that sends bytes one by one has no more time than others.
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
