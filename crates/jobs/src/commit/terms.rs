//! Parameters of a commit job.

use crate::name::Name;

/// Parameters of a commit job.
pub struct Terms {
    /// Limit in bytes per second. `None` means no limit.
    pub rate: Option<u64>,
    /// The image to which the data is written.
    pub below: Name,
}
