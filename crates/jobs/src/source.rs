//! What jobs work on.

use fathom_core::{Disk, DiskError, WorkerHandle};
use fathom_stack::Tap;
use fathom_storage::EngineKind;
use std::sync::Arc;

/// A disk that has users.
pub struct Source {
    /// Used like a client uses the disk, below its filters; not activated.
    pub disk: Arc<dyn Disk>,
    pub engine: EngineKind,
    /// Where users pass, whose workers these are.
    pub tap: Arc<Tap>,
    pub workers: Arc<[WorkerHandle]>,
}

/// A disk that is active, until this is dropped.
pub struct InUse(Arc<dyn Disk>);

impl InUse {
    pub fn new(disk: &Arc<dyn Disk>) -> Result<InUse, DiskError> {
        disk.activate()?;
        Ok(InUse(disk.clone()))
    }

    /// With what has become of it.
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
