//! Requests that concern a disk's definition, and their replies.

use crate::condition::Condition;
use fathom_spec::DiskSpec;
use fathom_stack::FilterInfo;
use fathom_trace::Summary;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Identifies a request until it has its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct RequestId(pub u64);

/// A request about one disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Request {
    /// Adds the disk, or changes the disk of that name.
    Put {
        spec: Box<DiskSpec>,
        /// Keys that the request names: a static disk that is served keeps all others. `None`: all keys.
        named: Option<BTreeSet<String>>,
        /// The change is not stored.
        until_restart: bool,
        only_if: Condition,
    },
    Remove {
        /// Disconnects the disk's users; without it, a disk in use stays.
        force: bool,
        how: Removal,
        only_if: Condition,
    },
    /// Changes options of a filter; an empty value is the option's default.
    SetFilter {
        /// Name of the filter, with `#2` for the second filter of that name.
        filter: String,
        options: BTreeMap<String, String>,
        /// The change is not stored.
        until_restart: bool,
    },
    Resize {
        /// New size in bytes. `None`: the present size of the disk's file.
        size: Option<u64>,
        shrink: bool,
    },
    /// Continues on another image.
    Switch {
        to: SwitchTo,
        /// Allows the switch for a static disk, whose definition then names the old image.
        transient: bool,
        leave_bitmaps: bool,
    },
    /// Stores the definition of a disk, as the disk is now.
    Adopt {
        /// Where the configuration or the command line still defines the disk.
        defined_at: Option<String>,
    },
}

/// What a removal does to a disk's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Removal {
    /// Removes the file of a persistent disk. A static disk is gone until the server restarts.
    Definition,
    /// Keeps the definition: the disk is gone until the server restarts.
    UntilRestart,
    /// No definition is left.
    Undefined,
}

/// The image on which a disk continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwitchTo {
    /// The target of the disk's mirror.
    Mirror,
    /// A new overlay on the disk's image.
    Layer(PathBuf),
}

/// Reply to a request that succeeded. `is_static`: the change lasts until the server restarts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Reply {
    /// The disk as it is now; `created`: whether the request added the disk.
    Disk {
        created: bool,
    },
    /// The disk's last statistics.
    Removed {
        statistics: Box<Summary>,
        is_static: bool,
    },
    Filter {
        info: FilterInfo,
        is_static: bool,
    },
    /// The disk's new size in bytes.
    Size {
        bytes: u64,
        is_static: bool,
    },
}
