//! What jobs work on.

use fathom_core::{Disk, WorkerHandle};
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
