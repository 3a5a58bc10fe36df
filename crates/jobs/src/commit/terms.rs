//! What is asked for.

use crate::name::Name;

/// How it is to be done.
pub struct Terms {
    /// Bytes a second; None: as many as there can be.
    pub rate: Option<u64>,
    /// The image that is written to.
    pub below: Name,
}
