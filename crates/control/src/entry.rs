//! The registry's state for one disk's name.

use crate::definition::Definition;
use crate::error::RequestError;
use crate::request::{Removal, Reply, Request, RequestId};
use fathom_spec::DiskSpec;
use fathom_trace::Summary;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The state for one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Entry {
    /// The definition in the configuration or on the command line, as last read.
    pub declared: Option<Box<DiskSpec>>,
    /// The definition that owns the name. `None`: the name is free.
    pub owner: Option<Definition>,
    pub presence: Presence,
    /// Whether a write or removal of the disk's file has failed, so that `owner` may differ from
    /// it.
    pub is_file_uncertain: bool,
    /// Why the disk's definition is unknown: there are two, or the disk's file cannot be read.
    pub conflict: Option<String>,
    /// Images from which a static disk has been switched away.
    pub left_images: BTreeSet<String>,
    /// The change in progress, of which there is at most one.
    pub work: Option<Work>,
    /// The removal that the host carries out.
    pub removal: Option<Removing>,
    /// Operations that wait for the end of `work` and `removal`, in this order.
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
        /// Error message for the user, in one line.
        problem: String,
        /// Number of failed attempts. The server retries, unless `is_final`.
        attempts: u32,
        /// Whether only another definition can help.
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
    /// Whether users are disconnected. Otherwise the host rejects the removal of a disk in use.
    pub is_forced: bool,
}

/// An operation that waits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Waiting {
    Request(Requester, Request),
    /// Applies the definition of the configuration or a file.
    ///
    /// `before` is the owner when the definition was read.
    Definition {
        spec: Box<DiskSpec>,
        owner: Definition,
        before: Option<Definition>,
    },
    /// Removes a disk without a definition. `before` is the owner when definitions were read.
    Undefined {
        before: Option<Definition>,
    },
    /// Finishes a removal that the host has carried out or rejected.
    Removed(Requester, Removal, Result<Box<Summary>, RequestError>),
}

/// A disk that is being added or changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Putting {
    pub by: Requester,
    /// The owner of the name afterwards. [`Definition::Transient`] changes no owner.
    pub owner: Definition,
    /// Whether the disk's file must be written.
    pub is_written: bool,
}

/// A change in progress. Each variant is one step that ends with an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Work {
    /// The host adds or changes the disk.
    Putting(Putting),
    /// The host removes a new disk again, because the disk's file could not be written.
    Withdrawing { by: Requester, problem: String },
    /// The file of such a disk is being removed, since the failed write may have created it.
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
    /// The host returns the options that will be stored.
    Adopting { by: Requester },
    /// The host opens the other image and holds users.
    PreparingSwitch { by: Requester },
    /// Users wait. The host returns the image that a static disk leaves for the image `now`.
    ShowingImage { by: Requester, now: String },
    /// Users continue on the other image.
    ///
    /// `before` is the former contents of the disk's file. `left` is the image that a static disk
    /// leaves, and its new image.
    EndingSwitch {
        by: Requester,
        before: Option<Box<DiskSpec>>,
        left: Option<(String, String)>,
    },
    /// Users continue: on the old image, or on the new one if the file still names that one.
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
    /// The disk's file could not be restored, and is read to learn its contents.
    ReadingFile { before: Box<DiskSpec>, then: Revert },
    /// The file of a disk that is no longer served is being removed.
    Erasing {
        by: Requester,
        statistics: Box<Summary>,
    },
}

/// The continuation after a file was written.
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
    /// The file is restored after a failed switch.
    Revert(Revert),
    /// The file is restored after the addition of a disk has failed.
    Withdrawn { by: Requester, problem: String },
}

/// Why a file is restored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Revert {
    /// Users wait: the file with the new image could not be written.
    BeforeSwitch { by: Requester, error: RequestError },
    /// The host has not switched.
    AfterSwitch { by: Requester, error: RequestError },
}

impl Work {
    /// Returns whether the disk's file is being written, read or removed.
    pub fn is_about_file(&self) -> bool {
        matches!(
            self,
            Work::Writing { .. }
                | Work::ReadingFile { .. }
                | Work::Erasing { .. }
                | Work::ErasingWithdrawn { .. }
        )
    }

    /// Returns whether the step is usually as short as a file write, so that other requests wait.
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

    /// Returns whether the name has no definition and no operation.
    pub fn is_free(&self) -> bool {
        let is_defined = self.declared.is_some() || self.owner.is_some() || self.conflict.is_some();
        !is_defined && self.is_settled()
    }

    /// Returns whether no operation is in progress.
    pub fn is_settled(&self) -> bool {
        self.work.is_none() && self.removal.is_none() && self.waiting.is_empty()
    }

    /// Returns the owner of the name, or the one that it gets when the server has tried to open the
    /// disk.
    pub fn owner_to_be(&self) -> Option<&Definition> {
        match &self.work {
            Some(Work::Putting(putting))
                if putting.by == Requester::Server && !self.is_served() =>
            {
                Some(&putting.owner)
            }
            _ => self.owner.as_ref(),
        }
    }

    /// Returns why a defined disk is not served, and whether the server retries.
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

    /// Returns the contents of the disk's file, if the disk is persistent.
    pub fn stored(&self) -> Option<&DiskSpec> {
        match &self.owner {
            Some(Definition::Persistent(spec)) => Some(spec),
            _ => None,
        }
    }
}
