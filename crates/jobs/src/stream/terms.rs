//! Parameters of a stream job.

use crate::name::Name;
use fathom_core::Disk;
use std::sync::Arc;

/// Parameters of a stream job.
pub struct Terms {
    /// Limit in bytes per second. `None` means no limit.
    pub rate: Option<u64>,
    /// Backing image that the disk's top image has at the end of the job.
    pub below: Below,
}

/// The backing image of the image at the end of the job.
pub enum Below {
    /// No backing image: the image holds all data itself.
    Nothing,
    /// An image of the disk's own backing chain.
    Own {
        /// Depth of the image in the chain, 2 or more; the top image has depth 0.
        depth: usize,
        /// Name by which the top image refers to it at the end of the job.
        name: Name,
    },
    /// Another image.
    Other {
        /// Disk of the image, which is not active and read only. Beyond its end it reads as zeroes.
        disk: Arc<dyn Disk>,
        /// Name by which the top image refers to it at the end of the job.
        name: Name,
    },
}

impl Below {
    /// Number of images of the chain to examine; data of the images below them stays there.
    pub(super) fn layers(&self) -> usize {
        match self {
            Below::Own { depth, .. } => *depth,
            Below::Nothing | Below::Other { .. } => usize::MAX,
        }
    }

    /// Returns the name of the future backing image; `None` if the image gets no backing image.
    pub fn name(&self) -> Option<&Name> {
        match self {
            Below::Nothing => None,
            Below::Own { name, .. } | Below::Other { name, .. } => Some(name),
        }
    }
}
