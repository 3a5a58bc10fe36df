//! What is asked for.

use crate::name::Name;
use fathom_core::Disk;
use std::sync::Arc;

/// How it is to be done.
pub struct Terms {
    /// Bytes a second; None: as many as there can be.
    pub rate: Option<u64>,
    pub below: Below,
}

/// What is below the image at the end.
pub enum Below {
    /// Nothing: it has all of its disk.
    Nothing,
    /// The image of that depth of the chain, 2 or more, which is called so.
    Own { depth: usize, name: Name },
    /// Another image, which is that disk, not active and only read; or reads as zeroes behind its end.
    Other { disk: Arc<dyn Disk>, name: Name },
}

impl Below {
    /// Images of the chain that are looked at: what those below them have stays there.
    pub(super) fn layers(&self) -> usize {
        match self {
            Below::Own { depth, .. } => *depth,
            Below::Nothing | Below::Other { .. } => usize::MAX,
        }
    }

    pub fn name(&self) -> Option<&Name> {
        match self {
            Below::Nothing => None,
            Below::Own { name, .. } | Below::Other { name, .. } => Some(name),
        }
    }
}
