//! Events that the registry takes, and the operations that it starts.

use crate::condition::Condition;
use crate::definition::Found;
use crate::error::RequestError;
use crate::request::{Reply, Request, RequestId, SwitchTo};
use fathom_spec::DiskSpec;
use fathom_stack::FilterInfo;
use fathom_trace::Summary;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A client has sent a request.
    Requested {
        id: RequestId,
        disk: String,
        request: Request,
    },
    /// The host has carried out what [`Effect::Ask`] asked, or has refused.
    HostDone {
        disk: String,
        slot: Slot,
        outcome: Result<Done, RequestError>,
    },
    /// [`Effect::Write`] or [`Effect::Erase`] has ended. On an error, the file may be the old or the new one.
    Stored {
        disk: String,
        outcome: Result<(), String>,
    },
    /// [`Effect::ReadFile`] has ended: what the disk's file says. `None`: the file does not exist.
    FileRead {
        disk: String,
        found: Result<Option<Box<DiskSpec>>, String>,
    },
    /// The configuration and `disks-dir` were read, between the operations on files whose ends came before this event
    /// and those whose ends come after it.
    DefinitionsRead {
        declared: Vec<DiskSpec>,
        /// `FILE:LINE` of each disk's entry in the configuration.
        places: BTreeMap<String, String>,
        found: Found,
    },
    /// The time of [`Effect::RetryAfter`] has passed.
    RetryDue { disk: String },
}

/// The host works on a change and on the removal of a disk at the same time: a disk whose process hangs can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Slot {
    Change,
    Removal,
}

/// An operation to start. Each ends with one event, except `Reply`, `Log` and `Forget`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Effect {
    /// Have the host carry this out; ends with [`Event::HostDone`].
    Ask {
        disk: String,
        slot: Slot,
        request: HostRequest,
    },
    /// Write the disk's file; ends with [`Event::Stored`] when the file is durable.
    Write(Box<DiskSpec>),
    /// Remove the disk's file; ends with [`Event::Stored`].
    Erase {
        disk: String,
    },
    /// Read the disk's file; ends with [`Event::FileRead`].
    ReadFile {
        disk: String,
    },
    /// Send a request's reply.
    Reply {
        to: RequestId,
        disk: String,
        reply: Result<Reply, RequestError>,
    },
    /// Send [`Event::RetryDue`] after this time.
    RetryAfter {
        disk: String,
        pause: Duration,
    },
    Log(Level, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Level {
    Error,
    Warning,
    Info,
}

/// What the host is asked to do with a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum HostRequest {
    /// Adds or changes the disk: [`Done::Put`].
    Put {
        spec: Box<DiskSpec>,
        named: Option<BTreeSet<String>>,
        only_if: Condition,
    },
    /// [`Done::Removed`].
    Remove { force: bool, only_if: Condition },
    /// [`Done::FilterSet`].
    SetFilter {
        filter: String,
        options: BTreeMap<String, String>,
    },
    /// [`Done::Resized`].
    Resize { size: Option<u64>, shrink: bool },
    /// Opens the other image and holds the disk's users: [`Done::SwitchPrepared`].
    BeginSwitch { to: SwitchTo, leave_bitmaps: bool },
    /// Lets users continue, with `go` on the other image: [`Done::Switched`].
    EndSwitch { go: bool },
    /// [`Done::Options`].
    ShowOptions,
}

/// What the host has done.
#[derive(Clone, Debug, PartialEq)]
pub enum Done {
    /// The disk is served.
    Put {
        created: bool,
    },
    Removed(Box<Summary>),
    FilterSet(FilterInfo),
    /// The disk's size in bytes.
    Resized(u64),
    /// Users wait. These are the disk's options with the other image.
    SwitchPrepared(Box<DiskSpec>),
    Switched,
    /// The options of the disk as it is served.
    Options(Box<DiskSpec>),
}
