//! What the host of a disk can be asked: the objects of this process, or the process of a tenant.

use crate::orders::{
    BackupOrder, BitmapOrder, CommitOrder, JobOrder, MirrorOrder, SnapshotsOrder, StreamOrder,
};
use fathom_control::{Condition, SwitchTo};
use fathom_metrics::JobId;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A command, and the disk that it is about. Only [`Command::Put`] has the disk's name in its options instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub disk: Option<String>,
    pub command: Command,
}

impl Ask {
    /// A command about a disk.
    pub fn of(disk: &str, command: Command) -> Ask {
        let disk = match command {
            Command::Put { .. } => None,
            _ => Some(disk.to_owned()),
        };
        Ask { disk, command }
    }

    /// The name of the disk that is meant.
    pub fn about(&self) -> Option<&str> {
        match &self.command {
            Command::Put { options, .. } => Some(&options.name),
            _ => self.disk.as_deref(),
        }
    }
}

impl Command {
    /// Serves a disk with these options and no others.
    pub fn put(table: DiskSpec) -> Command {
        Command::Put {
            options: Box::new(table),
            named: None,
            temporary: true,
            only_if: Condition::default(),
        }
    }

    /// Whether storage may have to answer first.
    pub fn is_slow(&self) -> bool {
        match self {
            Command::BeginMirror(_)
            | Command::BeginCommit(_)
            | Command::BeginStream(_)
            | Command::BeginBackup { .. }
            | Command::EndMirror { .. }
            | Command::EndStream
            | Command::EndBackup { .. }
            | Command::Job { .. }
            | Command::Bitmaps(_)
            | Command::Snapshots(_) => true,
            Command::Stats
            | Command::Slow
            | Command::Trace { .. }
            | Command::Resize { .. }
            | Command::Freeze { .. }
            | Command::Thaw
            | Command::GoOnWithBackup { .. }
            | Command::BeginSwitch { .. }
            | Command::EndSwitch { .. }
            | Command::Set { .. }
            | Command::Measure
            | Command::Show
            | Command::Put { .. }
            | Command::Remove { .. } => false,
        }
    }
}

/// A command to the host of a disk. (Tenants' processes of other versions understand these words, too.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Where a disk's requests spent their time: answered by a [`Summary`](fathom_trace::Summary).
    Stats,
    /// A disk's slowest requests of late, the slowest first: `{"requests": [a
    /// [`SlowRequest`](fathom_trace::SlowRequest), ...]}`.
    Slow,
    /// Trace a disk's requests to a file from now on, or no more.
    Trace { file: Option<PathBuf> },
    /// Give a disk another size, in bytes, or without one take in what its file has. It may become
    /// smaller if `shrink` says so: `{"size": bytes}`.
    Resize { size: Option<u64>, shrink: bool },
    /// Have the disk stand still, with its image closed, until it is thawed, or for so long:
    /// `{"frozen": true}`.
    Freeze { timeout_ms: Option<u64> },
    /// Let it go on: `{"frozen": false}`.
    Thaw,
    /// Keep a disk as it is now, for NBD clients: answered by a [`BackupInfo`](fathom_metrics::BackupInfo).
    BeginBackup { id: String, order: BackupOrder },
    /// Lets users go on whom the backup of that identity holds: answered likewise.
    GoOnWithBackup { id: String },
    /// Ends the backup of that identity, which may not have begun yet: answered likewise, by its final state.
    EndBackup { id: String },
    /// Copy a disk to another one, which may take its place: answered by a [`MirrorInfo`](fathom_metrics::MirrorInfo).
    BeginMirror(Box<MirrorOrder>),
    /// Copy what a disk has to the image below it, which may take its place: answered likewise. It is a mirror, too.
    BeginCommit(CommitOrder),
    /// Let that be: answered likewise, by what has become of it. If it is ready, and not by `force`, the target is then
    /// the disk as it was at an instant.
    EndMirror { force: bool },
    /// Have a disk's image make its own what is below it: answered by a [`StreamInfo`](fathom_metrics::StreamInfo).
    BeginStream(StreamOrder),
    /// Let that be: answered likewise, by what has become of it.
    EndStream,
    /// The first step of both: answered by the options that the disk has with that image, when its users wait.
    BeginSwitch {
        to: SwitchTo,
        /// The disk's bitmaps may stay with its old image.
        leave_bitmaps: bool,
    },
    /// The second one: they go on with it, or with what there was. Answered like `Show`.
    EndSwitch { go: bool },
    /// Dirty bitmaps: answered by those that there are then, [`Bitmaps`](fathom_metrics::Bitmaps).
    Bitmaps(BitmapOrder),
    /// Internal snapshots: answered by those that there are then, [`Snapshots`](fathom_metrics::Snapshots).
    Snapshots(SnapshotsOrder),
    /// The job with this identity: answered by a [`JobInfo`](fathom_metrics::JobInfo).
    Job { id: JobId, order: JobOrder },
    /// Change options of one of the disk's filters: all of them, or none.
    /// `filter` is its name, with `#2` for the second one of that name; an
    /// empty value is the option's default. Answered by a
    /// [`FilterInfo`](fathom_stack::FilterInfo) once all workers go by it.
    Set {
        filter: String,
        options: BTreeMap<String, String>,
        /// Not to be kept: it is as before when the server starts again.
        temporary: bool,
    },
    /// What is counted of a disk, a [`Measured`](fathom_metrics::Measured).
    Measure,
    /// A disk: `{"options": what it was added by, "state": an [`Info`](fathom_metrics::Info)}`.
    Show,
    /// Adds a disk, or changes the disk of that name as far as possible while it is served. The reply is
    /// that of `Show`, with `"created"`.
    Put {
        options: Box<DiskSpec>,
        /// Keys that the request names, whatever their values: a disk that is served keeps all others.
        /// `None`: all keys are named.
        #[serde(default)]
        named: Option<BTreeSet<String>>,
        temporary: bool,
        #[serde(default)]
        only_if: Condition,
    },
    /// Stops serving a disk. The reply, its last statistics, comes when nothing of it is in flight. A
    /// disk that is in use stays, unless `force` disconnects its users.
    Remove {
        force: bool,
        temporary: bool,
        #[serde(default)]
        only_if: Condition,
    },
}
