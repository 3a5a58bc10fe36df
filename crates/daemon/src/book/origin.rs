//! Why a disk is there.

use crate::table::DiskTable;
use serde::{Deserialize, Serialize};

/// What becomes of a disk when the server starts again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Origin {
    /// It is gone.
    Request,
    /// It is served by what its own file says.
    Kept(Box<DiskTable>),
    /// The configuration lists it.
    Configuration,
}
