//! Why a disk is there, and who owns its name.

use crate::owner::Owner;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};

/// What becomes of a disk when the server starts again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Origin {
    /// The API has added the disk, which is gone after a restart.
    Request,
    /// The disk is served again as its own file says.
    Kept(Box<DiskSpec>),
    /// The configuration or the command line defines the disk.
    Configuration,
}

impl Origin {
    pub fn owner(&self) -> Owner {
        match self {
            Origin::Request => Owner::Transient,
            Origin::Kept(_) => Owner::Persistent,
            Origin::Configuration => Owner::Static,
        }
    }
}
