//! Requests of a client of the API, or of the server itself, to the controller.

use crate::command::Command;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A request to the server. Comments name the content of its reply.
#[derive(Debug)]
pub enum Request {
    /// All disks: [`Disks`](crate::reply::Disks).
    List,
    /// A disk: [`Disk`](crate::reply::Disk).
    Show {
        /// Name of the disk.
        disk: String,
    },
    /// A change of what a disk is, about which the registry decides: a disk, its last statistics, a
    /// filter or a size.
    Change {
        /// Name of the disk.
        disk: String,
        /// Change to make.
        change: fathom_control::Request,
    },
    /// A command that the disk's host carries out, which says how it replies.
    Host {
        /// Name of the disk.
        disk: String,
        /// Command for the host of the disk.
        command: Command,
    },
    /// [`ThrottleGroups`](crate::reply::ThrottleGroups).
    ListGroups,
    /// Changes options of a throttle group, for all of its disks: the groups of that name.
    SetGroup {
        /// Name of the group.
        group: String,
        /// New values by option name.
        options: BTreeMap<String, String>,
        /// The change is not stored.
        until_restart: bool,
    },
    /// Has another process continue, of this program, or of the file that is now where this program
    /// came from: [`Successor`](crate::reply::Successor).
    Upgrade {
        /// Path of the program to start. `None`: the file that is now at the path of this program.
        binary: Option<PathBuf>,
        /// Ends the connections of NBD clients with TLS, which cannot be handed over.
        disconnect: bool,
    },
    /// Ends the server as SIGTERM does: [`Done`](crate::reply::Done).
    Quit,
}
