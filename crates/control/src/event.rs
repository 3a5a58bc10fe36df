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
        /// Identifier of the request, which its [`Effect::Reply`] repeats.
        id: RequestId,
        /// Name of the disk.
        disk: String,
        /// Request of the client.
        request: Request,
    },
    /// The host has carried out or rejected the request of an [`Effect::Ask`].
    HostDone {
        /// Name of the disk.
        disk: String,
        /// Slot of the [`Effect::Ask`].
        slot: Slot,
        /// Result of the request, or why the host did not carry it out.
        outcome: Result<Done, RequestError>,
    },
    /// An [`Effect::Write`] or [`Effect::Erase`] has ended. After an error, the file may be either
    /// the old or the new one.
    Stored {
        /// Name of the disk whose file was written or removed.
        disk: String,
        /// Error message for the user, in one line, if the operation failed.
        outcome: Result<(), String>,
    },
    /// An [`Effect::ReadFile`] has ended, with the file's contents. `None`: no such file.
    FileRead {
        /// Name of the disk whose file was read.
        disk: String,
        /// Definition in the file, or why the file cannot be used, in one line.
        found: Result<Option<Box<DiskSpec>>, String>,
    },
    /// The configuration and `disks-dir` were read.
    ///
    /// The read took place after all file operations whose events precede this one, and before all
    /// whose events follow it.
    DefinitionsRead {
        /// Disks that the configuration or the command line defines.
        declared: Vec<DiskSpec>,
        /// `FILE:LINE` of each disk's entry in the configuration.
        places: BTreeMap<String, String>,
        /// Contents of `disks-dir`.
        found: Found,
    },
    /// The time of [`Effect::RetryAfter`] has passed.
    RetryDue {
        /// Name of the disk.
        disk: String,
    },
}

/// The kind of a host's work on a disk. The host works on a change and a removal of a disk at the
/// same time, so that a disk whose process hangs can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Slot {
    /// All work except a removal.
    Change,
    /// The removal of the disk.
    Removal,
}

/// An operation to start. Each ends with one event, except `Reply` and `Log`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Effect {
    /// Sends a request to the host; ends with [`Event::HostDone`].
    Ask {
        /// Name of the disk.
        disk: String,
        /// Slot of the host's work, which [`Event::HostDone`] repeats.
        slot: Slot,
        /// Request to the host.
        request: HostRequest,
    },
    /// Writes the disk's file; ends with [`Event::Stored`] when the file is durable.
    Write(Box<DiskSpec>),
    /// Removes the disk's file; ends with [`Event::Stored`].
    Erase {
        /// Name of the disk.
        disk: String,
    },
    /// Reads the disk's file; ends with [`Event::FileRead`].
    ReadFile {
        /// Name of the disk.
        disk: String,
    },
    /// Sends the reply to a request.
    Reply {
        /// Identifier of the request.
        to: RequestId,
        /// Name of the disk that the request was about.
        disk: String,
        /// Reply, or why the request was not carried out.
        reply: Result<Reply, RequestError>,
    },
    /// Sends [`Event::RetryDue`] after this time.
    RetryAfter {
        /// Name of the disk.
        disk: String,
        /// Time until the event.
        pause: Duration,
    },
    /// Writes a line with this level to the log.
    Log(Level, String),
}

/// Level of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Level {
    /// An administrator must act.
    Error,
    /// An administrator should check the definition of a disk that is served anyway.
    Warning,
    /// The state of a disk has changed.
    Info,
}

/// A request to the host about a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum HostRequest {
    /// Adds or changes the disk. The reply is [`Done::Put`].
    Put {
        /// Options of the disk, with its name.
        spec: Box<DiskSpec>,
        /// Keys that the request names; a served static disk keeps its values of all other keys.
        /// `None`: all keys.
        named: Option<BTreeSet<String>>,
        /// Condition on the version of the disk; if it is not met, the host changes nothing.
        only_if: Condition,
    },
    /// Removes the disk. The reply is [`Done::Removed`].
    Remove {
        /// Whether to disconnect users; otherwise a disk in use is not removed.
        force: bool,
        /// Condition on the version of the disk; if it is not met, the host changes nothing.
        only_if: Condition,
    },
    /// Sets options of a filter. The reply is [`Done::FilterSet`].
    SetFilter {
        /// Name of the filter, with `#2` for the second filter of that name.
        filter: String,
        /// New values by option name. An empty value stands for the option's default.
        options: BTreeMap<String, String>,
    },
    /// Resizes the disk. The reply is [`Done::Resized`].
    Resize {
        /// New size in bytes. `None`: the present size of the disk's file.
        size: Option<u64>,
        /// Whether the new size may be smaller than the present one.
        shrink: bool,
    },
    /// Opens the other image and holds the disk's users. The reply is [`Done::SwitchPrepared`].
    BeginSwitch {
        /// Image to which the disk is switched.
        to: SwitchTo,
        /// Whether the disk's dirty bitmaps may stay with the old image.
        leave_bitmaps: bool,
    },
    /// Resumes users, on the other image if `go`. The reply is [`Done::Switched`].
    EndSwitch {
        /// Whether users continue on the other image; otherwise they continue on the old one.
        go: bool,
    },
    /// Returns the disk's options. The reply is [`Done::Options`].
    ShowOptions,
}

/// The host's reply to a successful request.
#[derive(Clone, Debug, PartialEq)]
pub enum Done {
    /// The disk is served.
    Put {
        /// Whether the disk was added; otherwise an existing disk was changed.
        created: bool,
    },
    /// The disk is removed. The summary has its last statistics.
    Removed(Box<Summary>),
    /// The options are set. The content is the filter with its new options.
    FilterSet(FilterInfo),
    /// The disk's size in bytes.
    Resized(u64),
    /// Users wait. The options are those of the disk with the other image.
    SwitchPrepared(Box<DiskSpec>),
    /// Users are resumed, on the image that [`HostRequest::EndSwitch`] has selected.
    Switched,
    /// The options of the served disk.
    Options(Box<DiskSpec>),
}
