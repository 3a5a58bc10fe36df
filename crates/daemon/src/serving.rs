//! Threads that serve clients.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// An export being served on a thread of its own.
pub struct Serving<E> {
    export: Arc<E>,
    stop: fn(&E),
    thread: JoinHandle<io::Result<()>>,
    /// Its other end is the thread's, so it hangs up when that ends.
    alive: UnixStream,
}

impl<E: Send + Sync + 'static> Serving<E> {
    /// Run `serve` on a thread with this name until `stop` makes it return.
    pub fn start(
        name: &str,
        export: Arc<E>,
        serve: impl FnOnce(&E) -> io::Result<()> + Send + 'static,
        stop: fn(&E),
    ) -> io::Result<Serving<E>> {
        let (alive, end) = UnixStream::pair()?;
        let body = {
            let export = export.clone();
            move || {
                let _end = end;
                serve(&export)
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
        Ok(Serving {
            export,
            stop,
            thread,
            alive,
        })
    }

    pub fn export(&self) -> &E {
        &self.export
    }

    /// Readable when serving has ended by itself, which it should not.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Disconnect clients with their requests drained, and remove the
    /// sockets.
    pub fn stop(self) -> io::Result<()> {
        (self.stop)(&self.export);
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
