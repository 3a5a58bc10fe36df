//! Parameters of a mirror.

use fathom_core::Disk;
use fathom_formats::served::ImageDisk;
use fathom_stack::Unserved;
use std::sync::Arc;

/// Parameters of a mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Limit in bytes per second. `None` means no limit.
    pub rate: Option<u64>,
    /// Whether to throttle users to the speed of copying.
    pub brakes: bool,
}

/// The target of a mirror.
pub enum Target {
    /// Another disk, which is not active and not used by anybody else.
    Other(Unserved),
    /// A lower image of the same chain.
    ///
    /// The data of the images above it is copied into it. These images hide the copied data, so the
    /// chain reads as the same disk at any time.
    Below(Arc<ImageDisk>),
}

impl Target {
    /// Returns the target disk. The error is a message for the user.
    pub(super) fn disk(&self) -> Result<Arc<dyn Disk>, String> {
        Ok(match self {
            Target::Other(other) => other.disk.clone(),
            Target::Below(image) => image.side_view().ok_or("no backing image to copy to")?,
        })
    }
}
