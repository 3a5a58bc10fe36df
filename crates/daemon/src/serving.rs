//! The thread that serves front-ends.

use fathom_exports::{Listener, VhostUser};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// An export being served.
pub struct Serving {
    export: Arc<VhostUser>,
    thread: JoinHandle<io::Result<()>>,
    /// Its other end is the thread's, so it hangs up when that ends.
    alive: UnixStream,
}

impl Serving {
    pub fn start(export: VhostUser, listener: Listener) -> io::Result<Serving> {
        let export = Arc::new(export);
        let (alive, end) = UnixStream::pair()?;
        let body = {
            let export = export.clone();
            move || {
                let _end = end;
                export.serve(&listener)
            }
        };
        let thread = std::thread::Builder::new()
            .name("vhost-user".into())
            .spawn(body)?;
        Ok(Serving {
            export,
            thread,
            alive,
        })
    }

    pub fn export(&self) -> &VhostUser {
        &self.export
    }

    /// Readable when serving has ended by itself, which it should not.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Disconnect the front-end with its queues drained, and remove the
    /// socket.
    pub fn stop(self) -> io::Result<()> {
        self.export.stop();
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
