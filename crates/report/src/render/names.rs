//! Names of what an analysis tells apart, as all renderers write them.

use crate::analysis::{Delivery, Group, HostClass, Point};

/// The wiki's names of its layers; with vhost-user its "QEMU" is the disk's server.
pub(crate) fn group(group: Group) -> &'static str {
    match group {
        Group::Guest => "Guest",
        Group::Switching => "Host/guest switching",
        Group::ServerSwitching => "Host/server switching",
        Group::Server => "Server (QEMU or the disk's)",
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
        HostClass::Cached => "without a device",
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

/// Points by their probes' names where they have one.
pub(crate) fn point(point: Point) -> &'static str {
    match point {
        Point::Call => "call",
        Point::Bio => "bio",
        Point::Issue => "issue",
        Point::Kick => "kick",
        Point::Exit => "exit",
        Point::Signal => "signal",
        Point::Wake => "wake",
        Point::Pop => "pop",
        Point::Map => "map",
        Point::Device => "device",
        Point::HostIssue => "host issue",
        Point::HostComplete => "host complete",
        Point::Result => "result",
        Point::Used => "used",
        Point::Interrupt => "interrupt",
        Point::Entry => "entry",
        Point::Handler => "handler",
        Point::Complete => "complete",
        Point::Return => "return",
    }
}
