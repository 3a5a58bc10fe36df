//! Reports clients of a disk.

use std::sync::Arc;

/// A client attached to a disk, or detached from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    Attached,
    Detached,
}

/// Called for each client, with its name for people. Must not block.
pub type Watch = Arc<dyn Fn(Visit, &str) + Send + Sync>;
