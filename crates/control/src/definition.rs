//! Definitions of disks: their places and contents.

use crate::owner::Owner;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The definition that owns a disk's name. The names in JSON are those of the handover.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Definition {
    /// The API added the disk, which does not survive a restart.
    #[serde(rename = "Request")]
    Transient,
    /// A file in `disks-dir`, with its contents.
    #[serde(rename = "Kept")]
    Persistent(Box<DiskSpec>),
    /// The configuration or the command line.
    #[serde(rename = "Configuration")]
    Static,
}

impl Definition {
    /// Returns the owner of the disk's name.
    pub fn owner(&self) -> Owner {
        match self {
            Definition::Transient => Owner::Transient,
            Definition::Persistent(_) => Owner::Persistent,
            Definition::Static => Owner::Static,
        }
    }
}

/// Definitions that a successor needs in addition to those of the served disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Definitions {
    /// Disks that the configuration or the command line defines, as last read.
    pub declared: BTreeMap<String, DiskSpec>,
    /// Definitions of disks that are not served: removed until a restart, or not opened because of
    /// an error.
    pub absent: BTreeMap<String, Definition>,
    /// Images from which each static disk has been switched away.
    pub left_images: BTreeMap<String, BTreeSet<String>>,
    /// Why disks could not be opened; the server retries these.
    #[serde(default)]
    pub failures: BTreeMap<String, String>,
}

/// Contents of `disks-dir`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// Definitions of all disks whose files can be used.
    pub disks: Vec<DiskSpec>,
    /// Files that cannot be used: the name of the disk of each, and a message for the user.
    pub problems: Vec<(String, String)>,
}

impl Found {
    /// Returns whether a file defines a disk of that name, readable or not.
    pub fn has(&self, name: &str) -> bool {
        self.disk(name).is_some() || self.problem(name).is_some()
    }

    /// Returns the contents of the disk's file.
    pub fn disk(&self, name: &str) -> Option<&DiskSpec> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// Returns why the disk's file cannot be used.
    pub fn problem(&self, name: &str) -> Option<&str> {
        let found = self.problems.iter().find(|(stem, _)| stem == name);
        found.map(|(_, problem)| problem.as_str())
    }
}
