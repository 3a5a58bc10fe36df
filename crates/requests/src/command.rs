//! Commands to the host of a disk: the objects of this process, or the process of a tenant.

use crate::orders::{
    BackupOrder, BitmapOrder, CommitOrder, JobOrder, MirrorOrder, SnapshotsOrder, StreamOrder,
};
use fathom_control::{Condition, SwitchTo};
use fathom_metrics::JobId;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A command, and the disk that it is about. Only [`Command::Put`] has the disk's name in its
/// options instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Name of the disk. `None` for [`Command::Put`].
    pub disk: Option<String>,
    /// Command for the host of the disk.
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

    /// Name of the disk.
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

/// A command to the host of a disk. (Tenants' processes of other versions understand these words,
/// too.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Statistics of the disk. Reply: [`Statistics`](crate::reply::Statistics).
    Stats,
    /// The disk's slowest recent requests. Reply: [`SlowRequests`](crate::reply::SlowRequests).
    Slow,
    /// Starts a trace to a file, or without a file ends the trace. Reply:
    /// [`TraceState`](crate::reply::TraceState).
    Trace {
        /// Path of the trace file. `None` ends the trace in progress.
        file: Option<PathBuf>,
    },
    /// Resizes the disk to a size in bytes, or without a size to the present size of its file.
    /// `shrink` allows a smaller size. Reply: [`Size`](crate::reply::Size).
    Resize {
        /// New size in bytes. `None`: the present size of the disk's file.
        size: Option<u64>,
        /// Whether the new size may be smaller than the present one.
        shrink: bool,
    },
    /// Freezes the disk and closes its image, until it is thawed or the timeout has passed. Reply:
    /// [`Frozen`](crate::reply::Frozen).
    Freeze {
        /// Time in milliseconds after which the disk is thawed. `None`: the disk stays frozen until
        /// [`Command::Thaw`].
        timeout_ms: Option<u64>,
    },
    /// Thaws the disk. Reply: [`Frozen`](crate::reply::Frozen).
    Thaw,
    /// Begins a backup. Reply: [`BackupInfo`](fathom_metrics::BackupInfo).
    BeginBackup {
        /// Identity of the backup: 32 hexadecimal digits, chosen by the client or the API.
        id: String,
        /// Options of the backup.
        order: BackupOrder,
    },
    /// Resumes guests and clients that the backup with this identity holds. The same reply.
    GoOnWithBackup {
        /// Identity of the backup.
        id: String,
    },
    /// Ends the backup with this identity, also before it has begun. Replies with its final state.
    EndBackup {
        /// Identity of the backup.
        id: String,
    },
    /// Begins a mirror. Reply: [`MirrorInfo`](fathom_metrics::MirrorInfo).
    BeginMirror(Box<MirrorOrder>),
    /// Begins a commit of the top image, which is a mirror to a backing image. The same reply.
    BeginCommit(CommitOrder),
    /// Ends the mirror. Replies with its final state. Without `force`, the mirror must be ready,
    /// and the target then has the contents that the disk had at an instant.
    EndMirror {
        /// Whether to end a mirror that is not ready, which leaves an incomplete target.
        force: bool,
    },
    /// Begins a stream, or a commit in the middle of the chain. Reply:
    /// [`StreamInfo`](fathom_metrics::StreamInfo).
    BeginStream(StreamOrder),
    /// Ends the stream. Replies with its final state.
    EndStream,
    /// First step of a switch to another image: opens that image and holds guests and clients.
    /// Replies with the disk's options with that image.
    BeginSwitch {
        /// Image to which the disk is switched.
        to: SwitchTo,
        /// Allows the disk's dirty bitmaps to stay with the old image.
        leave_bitmaps: bool,
    },
    /// Second step: resumes guests and clients, with `go` on the new image, otherwise on the old
    /// one. Replies like `Show`.
    EndSwitch {
        /// Whether to resume on the new image; otherwise on the old one.
        go: bool,
    },
    /// Lists or changes dirty bitmaps. Reply: all [`Bitmaps`](fathom_metrics::Bitmaps).
    Bitmaps(BitmapOrder),
    /// Lists or changes internal snapshots. Reply: all [`Snapshots`](fathom_metrics::Snapshots).
    Snapshots(SnapshotsOrder),
    /// Changes or ends the job with this identity. Reply: [`JobInfo`](fathom_metrics::JobInfo).
    Job {
        /// Identity of the job.
        id: JobId,
        /// Change of the job.
        order: JobOrder,
    },
    /// Changes options of a filter: all of them, or none. `filter` is the filter's name, with `#2`
    /// for the second filter of that name. An empty value is the option's default. Reply, when all
    /// workers apply the change: [`Filter`](crate::reply::Filter).
    Set {
        /// Name of the filter.
        filter: String,
        /// New values by option name.
        options: BTreeMap<String, String>,
        /// Ignored by hosts: the controller decides what is stored.
        temporary: bool,
    },
    /// Measurements of the disk. Reply: [`Measured`](fathom_metrics::Measured).
    Measure,
    /// Reply: [`Shown`](crate::reply::Shown).
    Show,
    /// Adds a disk, or changes the disk of that name as far as possible while it is served. Replies
    /// like `Show`.
    Put {
        /// Options of the disk, with its name.
        options: Box<DiskSpec>,
        /// Keys that the request names, also with default values: a disk that is served keeps its
        /// values of all other keys. `None`: all keys are named.
        #[serde(default)]
        named: Option<BTreeSet<String>>,
        /// Ignored by hosts: the controller decides what is stored.
        temporary: bool,
        /// Condition on the version of the disk; if it is not met, the host changes nothing.
        #[serde(default)]
        only_if: Condition,
    },
    /// Stops serving the disk. Replies with its last statistics when no requests are in flight. A
    /// disk in use stays, unless `force` disconnects its front-end and clients.
    Remove {
        /// Whether to disconnect the front-end and clients of a disk in use.
        force: bool,
        /// Ignored by hosts: the controller decides what is stored.
        temporary: bool,
        /// Condition on the version of the disk; if it is not met, the host changes nothing.
        #[serde(default)]
        only_if: Condition,
    },
}
