//! The process that takes over.

use super::starter::{Started, Starter};
use super::wire::Peer;
use fathom_units::cause;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// A successor. If it has not taken over when this value is dropped, the successor is killed; then
/// it has ended.
pub struct Successor<'a> {
    process: Started<'a>,
    pub peer: Peer,
    is_needed: bool,
}

impl Successor<'_> {
    /// Starts the process. The error is one line for the user.
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

    /// A process at the other end of this socket, started by another process; `kill` kills the
    /// successor.
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

    /// Makes the successor outlive this process, because it serves the disks.
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
