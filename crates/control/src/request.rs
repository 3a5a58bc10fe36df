//! Requests that concern a disk's definition, and their replies.

use crate::condition::Condition;
use fathom_spec::DiskSpec;
use fathom_stack::FilterInfo;
use fathom_trace::Summary;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Identifies a request until its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct RequestId(pub u64);

/// A request about one disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Request {
    /// Adds the disk, or changes the disk of that name.
    Put {
        /// Options of the disk, with its name.
        spec: Box<DiskSpec>,
        /// Keys that the request names. `None`: all keys.
        ///
        /// A served static disk keeps its values of all other keys.
        named: Option<BTreeSet<String>>,
        /// Whether the change is not stored.
        until_restart: bool,
        /// Condition on the version of the disk; if it is not met, the disk is not changed.
        only_if: Condition,
    },
    /// Removes the disk.
    Remove {
        /// Whether to disconnect users; otherwise a disk in use is not removed.
        force: bool,
        /// Effect on the disk's definition.
        how: Removal,
        /// Condition on the version of the disk; if it is not met, the disk is not removed.
        only_if: Condition,
    },
    /// Changes options of a filter. An empty value stands for the option's default.
    SetFilter {
        /// The name of the filter, with `#2` for the second filter of that name.
        filter: String,
        /// New values by option name.
        options: BTreeMap<String, String>,
        /// Whether the change is not stored.
        until_restart: bool,
    },
    /// Changes the size of the disk.
    Resize {
        /// New size in bytes. `None`: the present size of the disk's file.
        size: Option<u64>,
        /// Whether the new size may be smaller than the present one.
        shrink: bool,
    },
    /// Switches the disk to another image.
    Switch {
        /// Image to which the disk is switched.
        to: SwitchTo,
        /// Whether to allow a switch of a static disk, whose definition keeps the old image.
        transient: bool,
        /// Whether the disk's dirty bitmaps may stay with the old image.
        leave_bitmaps: bool,
    },
    /// Stores the present options of a disk as its definition.
    Adopt {
        /// The place in the configuration or command line that still defines the disk.
        defined_at: Option<String>,
    },
}

/// Effect of a removal on a disk's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Removal {
    /// Removes the file of a persistent disk. A static disk is removed until the server restarts.
    Definition,
    /// Keeps the definition: the disk is removed until the server restarts.
    UntilRestart,
    /// Removes a disk whose definition no longer exists.
    Undefined,
}

/// The image to which a disk is switched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwitchTo {
    /// The target of the disk's mirror.
    Mirror,
    /// A new overlay on the disk's image.
    Layer(PathBuf),
}

/// The reply to a successful request. `is_static`: the change lasts until the server restarts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Reply {
    /// The disk was added or changed; `created`: whether it was added.
    Disk {
        /// Whether the disk was added; otherwise an existing disk was changed.
        created: bool,
    },
    /// The disk's last statistics.
    Removed {
        /// Statistics of the disk when it was removed.
        statistics: Box<Summary>,
        /// Whether the disk is static, so that it is served again after a restart.
        is_static: bool,
    },
    /// The filter with its new options.
    Filter {
        /// The filter after the change.
        info: FilterInfo,
        /// Whether the disk is static, so that the change lasts until the server restarts.
        is_static: bool,
    },
    /// The disk's new size in bytes.
    Size {
        /// Size of the disk in bytes.
        bytes: u64,
        /// Whether the disk is static, so that the change lasts until the server restarts.
        is_static: bool,
    },
}
