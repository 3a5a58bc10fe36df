//! The disk on which a job works.

use fathom_core::{Disk, DiskError, WorkerHandle};
use fathom_stack::Tap;
use fathom_storage::EngineKind;
use std::sync::Arc;

/// A disk in use by front-ends or clients.
pub struct Source {
    /// The disk below its filters, used as clients use it; not activated.
    pub disk: Arc<dyn Disk>,
    /// Engine of the disk's workers, and the default for the job's own requests.
    pub engine: EngineKind,
    /// The tap through which users' requests pass, and the workers that process them.
    pub tap: Arc<Tap>,
    /// Workers that process the users' requests to the disk.
    pub workers: Arc<[WorkerHandle]>,
}

/// An activated disk, which is deactivated on drop.
pub struct InUse(Arc<dyn Disk>);

impl InUse {
    /// Activates the disk.
    ///
    /// # Errors
    /// The disk cannot be activated, and stays inactive.
    pub fn new(disk: &Arc<dyn Disk>) -> Result<InUse, DiskError> {
        disk.activate()?;
        Ok(InUse(disk.clone()))
    }

    /// Deactivates the disk and returns the result.
    pub fn end(self) -> Result<(), DiskError> {
        let disk = self.0.clone();
        std::mem::forget(self);
        disk.deactivate()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Err(error) = self.0.deactivate() {
            tracing::error!("{error}");
        }
    }
}
