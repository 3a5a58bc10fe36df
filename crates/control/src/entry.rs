//! What the registry knows of one disk's name.

use crate::definition::Definition;
use crate::error::RequestError;
use crate::request::{Removal, Reply, Request, RequestId};
use fathom_spec::DiskSpec;
use fathom_trace::Summary;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Everything about one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Entry {
    /// What the configuration or the command line says, as last read.
    pub declared: Option<Box<DiskSpec>>,
    /// The definition that owns the name. `None`: the name is free.
    pub owner: Option<Definition>,
    pub presence: Presence,
    /// A write or a removal of the disk's file has failed, so the file may not be what `owner` says.
    pub is_file_uncertain: bool,
    /// Why it is not known which definition the disk has: there are two, or the disk's file cannot be read.
    pub conflict: Option<String>,
    /// Images that a static disk has left by a switch to another image.
    pub left_images: BTreeSet<String>,
    /// The change in progress: one at a time.
    pub work: Option<Work>,
    /// The removal with the host.
    pub removal: Option<Removing>,
    /// What waits for the end of `work` and `removal`, in this order.
    pub waiting: VecDeque<Waiting>,
}

/// Whether a disk is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub enum Presence {
    /// The disk was removed until the server restarts, or has never been served.
    #[default]
    Absent,
    Served,
    /// The disk could not be opened.
    Failed {
        /// One line for the user.
        problem: String,
        /// Number of attempts that have failed. The server tries again, unless `is_final`.
        attempts: u32,
        /// Only another definition can help.
        is_final: bool,
    },
}

/// Receiver of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Requester {
    Client(RequestId),
    /// The server itself, which reads definitions: errors are logged.
    Server,
}

/// A removal that the host carries out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Removing {
    pub by: Requester,
    pub how: Removal,
    /// Users are disconnected. Otherwise the host refuses soon, if the disk has users.
    pub is_forced: bool,
}

/// What waits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Waiting {
    Request(Requester, Request),
    /// The disk as its configuration or file says. `before`: the owner when that was read.
    Definition {
        spec: Box<DiskSpec>,
        owner: Definition,
        before: Option<Definition>,
    },
    /// No definition is left. `before`: the owner when that was read.
    Undefined {
        before: Option<Definition>,
    },
    /// The host has removed the disk, or refused.
    Removed(Requester, Removal, Result<Box<Summary>, RequestError>),
}

/// A disk that is being added or changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Putting {
    pub by: Requester,
    /// The owner of the name afterwards. [`Definition::Transient`] changes no owner.
    pub owner: Definition,
    /// Whether the disk's file is to be written.
    pub is_written: bool,
}

/// A change in progress. Each variant is one step that ends with an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Work {
    /// The host adds or changes the disk.
    Putting(Putting),
    /// The host removes a new disk again, because the disk's file could not be written.
    Withdrawing { by: Requester, problem: String },
    /// The file of such a disk is being removed: the failed write may have created it.
    ErasingWithdrawn { by: Requester, problem: String },
    /// The host sets options of a filter.
    SettingFilter {
        by: Requester,
        filter: String,
        options: BTreeMap<String, String>,
        until_restart: bool,
    },
    /// The host resizes the disk.
    Resizing { by: Requester },
    /// The host shows the options that are to be stored.
    Adopting { by: Requester },
    /// The host opens the other image and holds users.
    PreparingSwitch { by: Requester },
    /// Users wait. The host shows which image a static disk leaves for `now`.
    ShowingImage { by: Requester, now: String },
    /// Users continue on the other image. `before`: what the disk's file said. `left`: the image that a static disk
    /// leaves, and its new image.
    EndingSwitch {
        by: Requester,
        before: Option<Box<DiskSpec>>,
        left: Option<(String, String)>,
    },
    /// Users continue: on the old image, or on the new image if the file still names that.
    UndoingSwitch {
        by: Requester,
        error: RequestError,
        is_switched: bool,
    },
    /// The disk's file is being written.
    Writing {
        spec: Box<DiskSpec>,
        then: AfterWrite,
    },
    /// The disk's file could not be written again and is read, to learn what it says.
    ReadingFile { before: Box<DiskSpec>, then: Revert },
    /// The file of a disk that is no longer served is being removed.
    Erasing {
        by: Requester,
        statistics: Box<Summary>,
    },
}

/// What follows when a file is durable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum AfterWrite {
    /// The disk was added or changed.
    Put { by: Requester, created: bool },
    /// The disk was changed.
    Reply { by: Requester, reply: Reply },
    /// Users continue on the new image.
    Switch {
        by: Requester,
        before: Box<DiskSpec>,
    },
    /// The file is to be as it was before a switch.
    Revert(Revert),
    /// The file is to be as it was before a disk was added that is not served any more.
    Withdrawn { by: Requester, problem: String },
}

/// Why a file is written as it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Revert {
    /// Users wait: the file with the new image could not be written.
    BeforeSwitch { by: Requester, error: RequestError },
    /// The host has not switched.
    AfterSwitch { by: Requester, error: RequestError },
}

impl Work {
    /// Whether the disk's file is being written, read or removed.
    pub fn is_about_file(&self) -> bool {
        matches!(
            self,
            Work::Writing { .. }
                | Work::ReadingFile { .. }
                | Work::Erasing { .. }
                | Work::ErasingWithdrawn { .. }
        )
    }

    /// Whether the step usually takes no longer than the write of a file, so that other requests wait for it.
    pub fn is_short(&self) -> bool {
        let is_question = matches!(self, Work::SettingFilter { .. } | Work::Adopting { .. });
        is_question || self.is_about_file()
    }
}

impl Entry {
    pub fn is_served(&self) -> bool {
        self.presence == Presence::Served
    }

    pub fn is_static(&self) -> bool {
        self.owner == Some(Definition::Static)
    }

    /// Whether nothing of the name is left.
    pub fn is_free(&self) -> bool {
        let is_defined = self.declared.is_some() || self.owner.is_some() || self.conflict.is_some();
        !is_defined && self.is_settled()
    }

    /// Whether no operation is in progress.
    pub fn is_settled(&self) -> bool {
        self.work.is_none() && self.removal.is_none() && self.waiting.is_empty()
    }

    /// Why the disk is not served although it is defined, and whether the server tries again.
    pub fn failure(&self) -> Option<(&str, bool)> {
        match (&self.conflict, &self.presence) {
            (_, Presence::Served) => None,
            (Some(problem), _) => Some((problem, false)),
            (
                None,
                Presence::Failed {
                    problem, is_final, ..
                },
            ) => Some((problem, !is_final)),
            (None, Presence::Absent) => None,
        }
    }

    /// What the disk's file says, if the disk is persistent.
    pub fn stored(&self) -> Option<&DiskSpec> {
        match &self.owner {
            Some(Definition::Persistent(spec)) => Some(spec),
            _ => None,
        }
    }
}
