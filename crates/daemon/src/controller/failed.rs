//! Disks that are defined, but not served, as the API shows them.

use fathom_control::Owner;
use fathom_spec::DiskSpec;
use serde::Serialize;
use utoipa::ToSchema;

/// A disk that is defined, but could not be opened, or has contradictory definitions.
#[derive(Serialize, ToSchema)]
pub struct FailedDisk {
    /// Name of the disk.
    pub name: String,
    /// Owner of the disk's name.
    pub owner: Owner,
    /// Options of the disk. Null if there is no definition that can be used.
    pub options: Option<DiskSpec>,
    /// Why the disk is not served.
    pub problem: String,
    /// The server tries again by itself, at most once a minute. False: only a change of the definition can help.
    pub retried: bool,
}
