//! The export of a disk as a file.

use super::device::Device;
use super::file::File;
use super::mount::Mounted;
use super::replies;
use super::source::{self, Completed};
use super::state::{Backend, Shared};
use fuser::{Config, Session, SessionACL};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

/// A disk that is mounted over a file.
pub struct FuseExport {
    shared: Arc<Shared>,
    is_writable: bool,
    /// Taken by [`FuseExport::serve`].
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    session: Session<File>,
    mounted: Mounted,
    completed: Receiver<Completed>,
}

impl FuseExport {
    /// Creates the export of a disk, which is mounted already. Programs wait until
    /// [`FuseExport::serve`].
    pub fn new(
        mut mounted: Mounted,
        is_writable: bool,
        backend: Backend,
    ) -> io::Result<FuseExport> {
        let (queue, source, completed) = source::queue()?;
        let file = mounted.file().to_owned();
        let shared = Arc::new(Shared::new(file, backend, queue, source));
        let device = mounted.take_device();
        let device = device.ok_or_else(|| io::Error::other("already has a session"))?;
        let file = File::new(shared.clone(), is_writable);
        // The kernel itself admits only processes of the server's user.
        let (access, config) = (SessionACL::All, Config::default());
        let session = Session::from_fd(file, device, access, config)?;
        shared.set_device(Device::of(&session)?);
        Ok(FuseExport {
            shared,
            is_writable,
            parts: Mutex::new(Some(Parts {
                session,
                mounted,
                completed,
            })),
        })
    }

    /// Serves programs until [`FuseExport::stop`], then unmounts the file.
    pub fn serve(&self) -> io::Result<()> {
        let Some(parts) = self.parts.lock().take() else {
            return Ok(());
        };
        let replies = replies::start(self.shared.clone(), parts.completed)?;
        let file = self.shared.file.display();
        // (An error is the end that `stop` has caused, or that of the mount.)
        let _ = parts.session.run();
        if !self.shared.is_ending() {
            tracing::warn!("{file}: unmounted by another program; the disk is served without it");
            self.shared.wait_for_end();
        }
        self.shared.end();
        let _ = replies.join();
        if !parts.mounted.unmount() {
            tracing::error!("{file}: cannot be unmounted; use 'umount -l' after the server's end");
        }
        Ok(())
    }

    /// Makes [`FuseExport::serve`] return when the requests in flight have been answered. Does not
    /// wait.
    pub fn stop(&self) {
        self.shared.begin_end();
    }

    /// Returns the mounted file.
    pub fn file(&self) -> &Path {
        &self.shared.file
    }

    /// Returns whether programs may write.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Returns how often programs have the file open.
    pub fn open_handles(&self) -> usize {
        self.shared.open_handles()
    }

    /// Invalidates the handles of all programs. Afterwards they do not use the disk.
    pub fn disconnect(&self) {
        self.shared.disconnect();
    }

    /// Detaches from the disk until [`FuseExport::go_on`]; requests wait.
    ///
    /// # Errors
    /// A sentence for the user if requests are still in flight at `deadline`. Requests continue
    /// then.
    pub fn hold(&self, deadline: Instant) -> Result<(), String> {
        self.shared.hold(deadline)
    }

    /// Ends [`FuseExport::hold`]. With `other`, this disk has the file from now on.
    pub fn go_on(&self, other: Option<Backend>) {
        self.shared.go_on(other);
    }
}

impl Drop for FuseExport {
    fn drop(&mut self) {
        if let Some(Parts {
            session, mounted, ..
        }) = self.parts.get_mut().take()
        {
            // Never served.
            drop(session);
            self.shared.end();
            mounted.unmount();
        }
    }
}
