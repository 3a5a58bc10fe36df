//! The process that is to take over.

use super::starter::{Started, Starter};
use super::wire::Peer;
use fathom_units::cause;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Killed when it is dropped, and waited for: after that it does nothing any more.
pub struct Successor<'a> {
    process: Started<'a>,
    pub peer: Peer,
    is_needed: bool,
}

impl Successor<'_> {
    /// Start it. The error is for the user.
    pub fn start(starter: &Starter, binary: Option<PathBuf>) -> Result<Successor<'_>, String> {
        let failed = |error| format!("cannot start the new process: {}", cause(error));
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let peer = Peer::new(ours).map_err(failed)?;
        Ok(Successor {
            process: starter.start(binary, theirs.into())?,
            peer,
            is_needed: false,
        })
    }

    /// One that somebody else has started, at the other end of this socket; `kill` ends it.
    pub fn elsewhere(
        socket: OwnedFd,
        kill: Box<dyn FnMut() -> Result<(), String> + '_>,
    ) -> io::Result<Successor<'_>> {
        Ok(Successor {
            peer: Peer::new(socket.into())?,
            process: Started::Elsewhere(kill),
            is_needed: false,
        })
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// It serves: it is to outlive this process.
    pub fn let_live(&mut self) {
        self.is_needed = true;
    }
}

impl Drop for Successor<'_> {
    fn drop(&mut self) {
        if !self.is_needed {
            self.process.kill();
        }
    }
}
