//! Reports clients of a disk.

use std::sync::Arc;

/// A client attached to a disk, or detached from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The client is now attached to the disk.
    Attached,
    /// The client is no longer attached to the disk.
    Detached,
}

/// Callback for each client that attaches or detaches; the text names the client for users. Must
/// not block.
pub type Watch = Arc<dyn Fn(Visit, &str) + Send + Sync>;
