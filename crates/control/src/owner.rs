//! Owners of disks' names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The owner of a disk's name, which decides what the disk is after a restart:
///
/// - `static`: the configuration or the command line. Changes last until the server restarts.
/// - `persistent`: a file in `disks-dir`. Changes are written to it.
/// - `transient`: the API. The disk is gone when the server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// The configuration or the command line: changes last until the server restarts.
    Static,
    /// A file in disks-dir: changes are written to it.
    Persistent,
    /// The API: the disk is gone when the server ends.
    Transient,
}

impl Owner {
    /// Returns a sentence for display: how long changes of such a disk last.
    pub fn describe(self) -> &'static str {
        match self {
            Owner::Static => "static: changes last until the server restarts",
            Owner::Persistent => "persistent: changes are written to the disk's file in disks-dir",
            Owner::Transient => "transient: the disk is gone when the server ends",
        }
    }

    /// Returns the name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Owner::Static => "static",
            Owner::Persistent => "persistent",
            Owner::Transient => "transient",
        }
    }
}
