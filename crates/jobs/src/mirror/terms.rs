//! What is asked for, and what is told.

use fathom_core::Disk;
use fathom_formats::served::ImageDisk;
use fathom_stack::Unserved;
use std::sync::Arc;

/// How it is to be copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Bytes a second; None: as many as there can be.
    pub rate: Option<u64>,
    /// Users change no more than is copied meanwhile.
    pub brakes: bool,
}

/// Where a disk is copied to.
pub enum Target {
    /// Another disk, which is not active, and used by nobody else.
    Other(Unserved),
    /// The image below that disk that is written to, too: what those above it have is copied into it, where nobody sees it
    /// because of them. It is the same disk all the time to those who go by the chain.
    Below(Arc<ImageDisk>),
}

impl Target {
    /// The error is for the user.
    pub(super) fn disk(&self) -> Result<Arc<dyn Disk>, String> {
        Ok(match self {
            Target::Other(other) => other.disk.clone(),
            Target::Below(image) => image.beside().ok_or("no backing image to copy to")?,
        })
    }
}
