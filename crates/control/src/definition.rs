//! Definitions of disks: where each one is, and what it says.

use crate::owner::Owner;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The definition that owns a disk's name. (The names in JSON are those of the handover.)
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Definition {
    /// The API added the disk, which is gone after a restart.
    #[serde(rename = "Request")]
    Transient,
    /// A file in `disks-dir`, with what it says.
    #[serde(rename = "Kept")]
    Persistent(Box<DiskSpec>),
    /// The configuration or the command line.
    #[serde(rename = "Configuration")]
    Static,
}

impl Definition {
    pub fn owner(&self) -> Owner {
        match self {
            Definition::Transient => Owner::Transient,
            Definition::Persistent(_) => Owner::Persistent,
            Definition::Static => Owner::Static,
        }
    }
}

/// What a successor has to know of definitions beside those of the disks that are served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Definitions {
    /// Disks that the configuration or the command line defines, as last read.
    pub declared: BTreeMap<String, DiskSpec>,
    /// Definitions of disks that are not served: each was removed until the server restarts, or could not be opened.
    pub absent: BTreeMap<String, Definition>,
    /// Images that each static disk has left by a switch to another image.
    pub left_images: BTreeMap<String, BTreeSet<String>>,
    /// Why disks could not be opened; the server retries these.
    #[serde(default)]
    pub failures: BTreeMap<String, String>,
}

/// Contents of `disks-dir`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    pub disks: Vec<DiskSpec>,
    /// Files that cannot be used: the name of the disk that each would define, and a line for the user.
    pub problems: Vec<(String, String)>,
}

impl Found {
    /// Whether a file defines a disk of that name, readable or not.
    pub fn has(&self, name: &str) -> bool {
        self.disk(name).is_some() || self.problem(name).is_some()
    }

    /// What the file of that disk says.
    pub fn disk(&self, name: &str) -> Option<&DiskSpec> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// Why the file of that disk cannot be used.
    pub fn problem(&self, name: &str) -> Option<&str> {
        let found = self.problems.iter().find(|(stem, _)| stem == name);
        found.map(|(_, problem)| problem.as_str())
    }
}
