//! Requests to a server and to the hosts of its disks, with their replies.
//!
//! A client of the API asks the server ([`Request`]), which asks the host of a disk ([`Command`]):
//! the objects of its own process, or the process of a tenant.

mod command;
mod identity;
mod orders;
mod reply;
mod request;

pub use command::{Ask, Command};
pub use identity::{is_identity, new_identity};
pub use orders::{
    Advance, BackupOrder, BitmapOrder, CommitOrder, Completion, JobOrder, Merged, MirrorOrder,
    NewBitmap, NewName, SnapshotOrder, SnapshotsOrder, StreamOrder,
};
pub use reply::{
    Answer, Disk, Disks, Done, FailedDisk, Filter, Frozen, Reply, Responder, Shown, Size,
    SlowRequests, Statistics, Successor, TenantSuccessor, ThrottleGroup, ThrottleGroups,
    TraceState,
};
pub use request::Request;
