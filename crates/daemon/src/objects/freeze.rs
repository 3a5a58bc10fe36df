//! A disk that stands still: nothing of it is in flight, its image is closed and free, and whoever uses
//! it waits until it is thawed.

use crate::signals::LeftToThisThread;
use fathom_core::{ThreadKind, thread_starts};
use fathom_exports::vhost_user::Frozen;
use fathom_exports::{NbdServer, VhostUser};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What is in flight has so long to end.
const HALT: Duration = Duration::from_secs(5);

/// Whom a disk is served to.
pub struct Users {
    pub export: Option<Arc<VhostUser>>,
    /// By the name of its export.
    pub clients: Option<(Arc<NbdServer>, String)>,
}

/// The users of a disk that stands still. They resume when this is dropped, of which `thaw` also waits for
/// the virtual machine.
pub struct Waiting {
    export: Option<Frozen>,
    clients: Option<(Arc<NbdServer>, String)>,
}

impl Users {
    /// Have them wait, on a thread of its own, which tells what has become of it.
    pub fn begin_to_freeze(
        self,
        tell: impl FnOnce(Result<Waiting, String>) + Send + 'static,
    ) -> io::Result<()> {
        on_a_thread("freeze a disk", move || tell(self.freeze()))
    }

    /// Returns when they wait.
    pub fn freeze(self) -> Result<Waiting, String> {
        let export = self.export.map(|export| export.freeze()).transpose()?;
        let waiting = Waiting {
            export,
            clients: self.clients,
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
            // Before the virtual machine lets go of the disk, on which clients depend.
            server.hold_export(name, deadline)?;
        }
        if let Some(export) = &self.export {
            export.begin_halt().wait(deadline)?;
        }
        Ok(())
    }

    /// Lets the users resume, on a thread of its own. If no thread can be started they resume, too, and
    /// `tell` is not called.
    pub fn begin_to_thaw(self, tell: impl FnOnce() + Send + 'static) -> io::Result<()> {
        on_a_thread("thaw a disk", move || {
            self.thaw();
            tell();
        })
    }

    /// Lets the users resume; returns when they have.
    pub fn thaw(mut self) {
        if let Some(export) = self.export.take() {
            export.go_on().wait(HALT);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // The virtual machine first: clients depend on it.
        drop(self.export.take());
        if let Some((server, name)) = &self.clients {
            server.go_on_export(name, None);
        }
    }
}

/// Has it done on a thread of its own, which signals do not come to.
pub fn on_a_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let _signals = LeftToThisThread::new();
    let builder = thread::Builder::new().name(name.into());
    builder.spawn(move || {
        thread_starts(ThreadKind::General);
        work();
    })?;
    Ok(())
}
