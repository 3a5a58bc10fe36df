//! Who wants to hear of clients.

use std::sync::Arc;

/// Someone uses a disk, or does no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    Attached,
    Detached,
}

/// Told of each client, by what it is called for people. It does not block.
pub type Watch = Arc<dyn Fn(Visit, &str) + Send + Sync>;
