//! Events that the registry processes, and operations that it starts.

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

/// An event for the registry.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A client has sent a request.
    Requested {
        id: RequestId,
        disk: String,
        request: Request,
    },
    /// The host has carried out or rejected the request of an [`Effect::Ask`].
    HostDone {
        disk: String,
        slot: Slot,
        outcome: Result<Done, RequestError>,
    },
    /// An [`Effect::Write`] or [`Effect::Erase`] has ended. After an error, the file may be either
    /// the old or the new one.
    Stored {
        disk: String,
        outcome: Result<(), String>,
    },
    /// An [`Effect::ReadFile`] has ended, with the file's contents. `None`: no such file.
    FileRead {
        disk: String,
        found: Result<Option<Box<DiskSpec>>, String>,
    },
    /// The configuration and `disks-dir` were read.
    ///
    /// The read took place after all file operations whose events precede this one, and before all
    /// whose events follow it.
    DefinitionsRead {
        declared: Vec<DiskSpec>,
        /// `FILE:LINE` of each disk's entry in the configuration.
        places: BTreeMap<String, String>,
        found: Found,
    },
    /// The time of [`Effect::RetryAfter`] has passed.
    RetryDue { disk: String },
}

/// The kind of a host's work on a disk. The host works on a change and a removal of a disk at the
/// same time, so that a disk whose process hangs can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Slot {
    Change,
    Removal,
}

/// An operation to start. Each ends with one event, except `Reply` and `Log`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Effect {
    /// Sends a request to the host; ends with [`Event::HostDone`].
    Ask {
        disk: String,
        slot: Slot,
        request: HostRequest,
    },
    /// Writes the disk's file; ends with [`Event::Stored`] when the file is durable.
    Write(Box<DiskSpec>),
    /// Removes the disk's file; ends with [`Event::Stored`].
    Erase {
        disk: String,
    },
    /// Reads the disk's file; ends with [`Event::FileRead`].
    ReadFile {
        disk: String,
    },
    /// Sends the reply to a request.
    Reply {
        to: RequestId,
        disk: String,
        reply: Result<Reply, RequestError>,
    },
    /// Sends [`Event::RetryDue`] after this time.
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

/// A request to the host about a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum HostRequest {
    /// Adds or changes the disk. The reply is [`Done::Put`].
    Put {
        spec: Box<DiskSpec>,
        named: Option<BTreeSet<String>>,
        only_if: Condition,
    },
    /// Removes the disk. The reply is [`Done::Removed`].
    Remove { force: bool, only_if: Condition },
    /// Sets options of a filter. The reply is [`Done::FilterSet`].
    SetFilter {
        filter: String,
        options: BTreeMap<String, String>,
    },
    /// Resizes the disk. The reply is [`Done::Resized`].
    Resize { size: Option<u64>, shrink: bool },
    /// Opens the other image and holds the disk's users. The reply is [`Done::SwitchPrepared`].
    BeginSwitch { to: SwitchTo, leave_bitmaps: bool },
    /// Resumes users, on the other image if `go`. The reply is [`Done::Switched`].
    EndSwitch { go: bool },
    /// Returns the disk's options. The reply is [`Done::Options`].
    ShowOptions,
}

/// The host's reply to a successful request.
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
    /// Users wait. The options are those of the disk with the other image.
    SwitchPrepared(Box<DiskSpec>),
    Switched,
    /// The options of the served disk.
    Options(Box<DiskSpec>),
}
