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

/// An export being served on a thread of its own.
pub struct Serving<E> {
    export: Arc<E>,
    stop: fn(&E),
    /// Until its end.
    thread: Option<JoinHandle<io::Result<()>>>,
    /// Its other end is the thread's, so it hangs up when that ends.
    alive: UnixStream,
}

impl<E: Send + Sync + 'static> Serving<E> {
    /// Run `serve` on a thread of that kind with this name until `stop` makes it return.
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

    /// Readable when serving has ended by itself, which it should not.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Disconnect clients with their requests drained, and remove the
    /// sockets; does not wait for it.
    pub fn begin_stop(&self) {
        (self.stop)(&self.export);
    }

    /// Wait for the end of that until `deadline`. None: it is not over.
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

/// Whether the other end is gone before `deadline`.
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
