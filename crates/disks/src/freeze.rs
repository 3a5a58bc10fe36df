//! Freezes a disk: no requests are in flight, its image is closed, and its front-end and clients
//! wait until the disk is thawed.

use fathom_core::{ThreadKind, thread_starts};
use fathom_exports::vhost_user::Frozen;
use fathom_exports::{FuseExport, NbdServer, VhostUser};
use fathom_host::signals::LeftToThisThread;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Timeout for requests in flight.
const HALT: Duration = Duration::from_secs(5);

/// The front-end and the clients of a disk. Programs that use its file are clients, too.
pub struct Users {
    pub export: Option<Arc<VhostUser>>,
    /// The NBD server, and the name of the disk's export.
    pub clients: Option<(Arc<NbdServer>, String)>,
    /// The mounted file.
    pub file: Option<Arc<FuseExport>>,
}

/// The waiting front-end and clients of a frozen disk. Dropping this value resumes them. `thaw`
/// also waits until the front-end has resumed.
pub struct Waiting {
    export: Option<Frozen>,
    clients: Option<(Arc<NbdServer>, String)>,
    file: Option<Arc<FuseExport>>,
}

impl Users {
    /// Begins to freeze the disk, on a thread of its own. `tell` receives the result.
    pub fn begin_to_freeze(
        self,
        tell: impl FnOnce(Result<Waiting, String>) + Send + 'static,
    ) -> io::Result<()> {
        on_a_thread("freeze a disk", move || tell(self.freeze()))
    }

    /// Freezes the disk. Returns when front-end and clients wait.
    pub fn freeze(self) -> Result<Waiting, String> {
        let export = self.export.map(|export| export.freeze()).transpose()?;
        let waiting = Waiting {
            export,
            clients: self.clients,
            file: self.file,
        };
        match waiting.halt() {
            Ok(()) => Ok(waiting),
            Err(problem) => {
                waiting.thaw();
                Err(problem)
            }
        }
    }
}

impl Waiting {
    fn halt(&self) -> Result<(), String> {
        let deadline = Instant::now() + HALT;
        if let Some((server, name)) = &self.clients {
            // (Before the front-end stops: clients depend on it.)
            server.hold_export(name, deadline)?;
        }
        if let Some(file) = &self.file {
            file.hold(deadline)?;
        }
        if let Some(export) = &self.export {
            export.begin_halt().wait(deadline)?;
        }
        Ok(())
    }

    /// Thaws the disk, on a thread of its own. If no thread can be started, the disk is thawed at
    /// once, and `tell` is not called.
    pub fn begin_to_thaw(self, tell: impl FnOnce() + Send + 'static) -> io::Result<()> {
        on_a_thread("thaw a disk", move || {
            self.thaw();
            tell();
        })
    }

    /// Thaws the disk. Returns when front-end and clients have resumed.
    pub fn thaw(mut self) {
        if let Some(export) = self.export.take() {
            export.go_on().wait(HALT);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // (The front-end first: clients depend on it.)
        drop(self.export.take());
        if let Some((server, name)) = &self.clients {
            server.go_on_export(name, None);
        }
        if let Some(file) = &self.file {
            file.go_on(None);
        }
    }
}

/// Runs an operation on a thread of its own, which gets no signals.
pub fn on_a_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let _signals = LeftToThisThread::begin();
    let builder = thread::Builder::new().name(name.into());
    builder.spawn(move || {
        thread_starts(ThreadKind::General);
        work();
    })?;
    Ok(())
}
