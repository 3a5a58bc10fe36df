//! Threads that serve clients.

use fathom_core::{ThreadKind, thread_starts};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// An export that is served by a thread of its own.
pub struct Serving<E> {
    export: Arc<E>,
    stop: fn(&E),
    /// The thread, until its end is noticed.
    thread: Option<JoinHandle<io::Result<()>>>,
    /// An end of a socket pair. The thread has the other end, so that this end hangs up when the
    /// thread ends.
    alive: UnixStream,
}

impl<E: Send + Sync + 'static> Serving<E> {
    /// Calls `serve` on a thread of this kind and name. `stop` makes `serve` return.
    pub fn start(
        kind: ThreadKind,
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
                thread_starts(kind);
                serve(&export)
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
        Ok(Serving {
            export,
            stop,
            thread: Some(thread),
            alive,
        })
    }

    pub fn shared(&self) -> Arc<E> {
        self.export.clone()
    }

    pub fn export(&self) -> &E {
        &self.export
    }

    /// Returns a file descriptor that is readable after the thread has ended. An end without a call
    /// of `begin_stop` is an error.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Begins to drain requests, to disconnect clients, and to remove the sockets. Does not wait.
    pub fn begin_stop(&self) {
        (self.stop)(&self.export);
    }

    /// Waits for the end of the thread. None: the thread has not ended at `deadline`.
    pub fn end(&mut self, deadline: Instant) -> Option<io::Result<()>> {
        if !hangs_up(&self.alive, deadline) {
            return None;
        }
        Some(match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        })
    }
}

/// Waits until the other end is closed. False: the other end is still open at `deadline`.
fn hangs_up(end: &UnixStream, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(end, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            result => return result == Ok(1),
        }
    }
}
