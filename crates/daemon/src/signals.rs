//! SIGTERM and SIGINT as something to poll for.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Readable once the process was asked to end.
pub struct Termination(UnixStream);

impl Termination {
    /// From now on the first signal makes this readable; a second one ends
    /// the process at once, should draining take too long for somebody.
    pub fn new() -> io::Result<Termination> {
        let (reader, writer) = UnixStream::pair()?;
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // The order matters: the first signal must not find its own mark.
            flag::register_conditional_shutdown(signal, 1, asked.clone())?;
            flag::register(signal, asked.clone())?;
            low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        Ok(Termination(reader))
    }
}

impl AsFd for Termination {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
