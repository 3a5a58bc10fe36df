//! Definitions of disks.

use super::origin::Origin;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What a server knows of its disks' definitions, beside why each disk is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Definitions {
    /// Disks that the configuration or the command line defines, as last read.
    pub declared: BTreeMap<String, DiskSpec>,
    /// Owners of disks that were removed until the server restarts.
    pub absent: BTreeMap<String, Origin>,
    /// Images that each static disk has left by a switch to another image.
    pub left_images: BTreeMap<String, BTreeSet<String>>,
}

/// What a removal does to a disk's definition.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Removes the file of a persistent disk. A static disk is gone until the server restarts.
    Definition,
    /// Keeps the definition: the disk is gone until the server restarts.
    UntilRestart,
    /// No definition is left.
    Undefined,
}

impl Definitions {
    /// Definitions of a server that begins with these static disks.
    pub fn of(declared: impl IntoIterator<Item = DiskSpec>) -> Definitions {
        let declared = declared.into_iter();
        Definitions {
            declared: declared.map(|table| (table.name.clone(), table)).collect(),
            ..Definitions::default()
        }
    }

    /// Whether this disk has left that image by a switch.
    pub fn has_left(&self, disk: &str, image: &str) -> bool {
        let left = self.left_images.get(disk);
        left.is_some_and(|images| images.contains(image))
    }
}
