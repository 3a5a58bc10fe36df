//! Names of an analysis's enum values, shared by all renderers.

use crate::analysis::{Delivery, Group, HostClass};

/// Returns a group's name, as in the wiki; with vhost-user, the wiki's "QEMU" is the disk's server.
pub(crate) fn group(group: Group) -> &'static str {
    match group {
        Group::Guest => "Guest",
        Group::Switching => "Host/guest switching",
        Group::ServerSwitching => "Host/server switching",
        Group::Server => "Server (QEMU or the disk's)",
        Group::Network => "Network",
        Group::RemoteServer => "Remote server",
        Group::RemoteIo => "Remote I/O",
        Group::HostIo => "Host I/O",
        Group::Device => "Device, as the guest sees it",
        Group::Unattributed => "Unattributed",
    }
}

pub(crate) fn host(class: HostClass) -> &'static str {
    match class {
        HostClass::Direct => "one for one",
        HostClass::Split => "split",
        HostClass::Merged => "merged",
        HostClass::Cached => "answered from page cache, holes or zeroes",
        HostClass::Remote => "remote",
        HostClass::Unknown => "unknown",
    }
}

pub(crate) fn delivery(delivery: Delivery) -> &'static str {
    match delivery {
        Delivery::Kicked => "kicked",
        Delivery::Batched => "batched",
        Delivery::Polled => "polled",
        Delivery::Unknown => "unknown",
    }
}
