//! What can be asked of a server: the only way to change anything of it.

use crate::condition::Condition;
use crate::table::DiskTable;
use crate::text;
use fathom_formats::Format;
use fathom_stack::{KeySource, parse_format};
use fathom_storage::Location;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A command, and the disk that it is about; none where it concerns the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub disk: Option<String>,
    pub command: Command,
}

impl Command {
    /// Serves a disk with these options and no others.
    pub fn put(table: DiskTable) -> Command {
        Command::Put {
            options: Box::new(table),
            named: None,
            temporary: true,
            only_if: Condition::default(),
        }
    }
}

impl Ask {
    /// The name of the disk that is meant.
    pub fn about(&self) -> Option<&str> {
        match &self.command {
            Command::Put { options, .. } => Some(&options.name),
            _ => self.disk.as_deref(),
        }
    }
}

/// How a backup is to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BackupOrder {
    /// The Unix socket at which NBD clients read the disk as it was [default: beside that of front-ends]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// The directory of the file that keeps what users change meanwhile, until the backup ends
    /// [default: where the image is]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub scratch: Option<PathBuf>,
    /// So much that file may take: the backup has failed when users have changed more
    /// [default: half of what is left there at the beginning]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub scratch_size: Option<u64>,
    /// The dirty bitmap that says what has been changed before, as `qemu:dirty-bitmap:NAME`. It advances to this
    /// backup when that is asked for; if it is not there, it begins with this one
    #[serde(default)]
    pub bitmap: Option<String>,
    /// Users change nothing until the backup is told to go on, so that several begin at one instant: they wait for some seconds
    /// at most, and then the backup has failed
    #[serde(default)]
    pub held: bool,
}

/// What a bitmap is to be like.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NewBitmap {
    /// Bytes that a bit stands for [default: 64k, and more of very large disks]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub granularity: Option<u64>,
}

/// What a bitmap is to advance to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Advance {
    /// The `successor` of the backup that is safe [default: the last one that has begun]
    #[serde(default)]
    pub to: Option<u64>,
}

/// Where a disk is to be copied to while it is used, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MirrorOrder {
    /// What becomes the same disk: of the same size, and used by nobody else. What it has is overwritten
    #[serde(with = "text")]
    #[schema(value_type = String, examples("/srv/disk.qcow2", "nbd://host/disk"))]
    pub target: Location,
    /// The target's format [default: raw]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    /// Bytes a second [default: as many as there can be]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
    /// Once all has been copied, users change no more than is copied meanwhile: so that the target comes up with them
    #[serde(default)]
    pub active: bool,
    /// What unlocks the target [default: what unlocks the disk]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub keys: Vec<KeySource>,
}

fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    text::optional::parse(from, parse_format)
}

/// Into which image below a disk's own what it has is to be brought, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CommitOrder {
    /// One of the chain's files. (It is written to because it is named here, not because an image names it.)
    #[schema(value_type = String)]
    pub base: PathBuf,
    /// Bytes a second [default: as many as there can be]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
    /// See [`MirrorOrder::active`]
    #[serde(default)]
    pub active: bool,
    /// Even if the server's configuration or command line says which image the disk has: when it is started again, it must
    /// not have one of those that are written to, or go, but the one that the disk has then
    #[serde(default)]
    pub unkept: bool,
}

/// What a disk's image is to have below it, once all else is its own; or another image of its chain, once all else is in that
/// below.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamOrder {
    /// A file: one of those that are below it, or another one, which need not have the same in it [default: nothing]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// Its format; only of one that is not below it yet [default: raw]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    /// A file between the disk's own image and the base: what it and those between it and the base have is brought down into
    /// the base. (That one is written to because it is named here; of the image above the top the header is, to name the base.)
    /// [default: what is above the base comes up, and becomes the image's own]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub top: Option<PathBuf>,
    /// Bytes a second [default: as many as there can be]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
}

/// What is to be put on top of a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SnapshotOrder {
    /// The qcow2 image to make, which has what is changed from then on: a file that is not there
    #[schema(value_type = String)]
    pub overlay: PathBuf,
    /// See [`Completion`]
    #[serde(default)]
    pub unkept: bool,
    /// Even if the disk has dirty bitmaps, which stay with the image that it has now
    #[serde(default)]
    pub leave_bitmaps: bool,
}

/// The image with which a disk is to go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwitchTo {
    /// The target of its mirror.
    Mirror,
    /// A new one on top of that which it has.
    Layer(PathBuf),
}

/// How a disk is to go on with the target of its mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Completion {
    /// Even if the server would have the old image again when it is started again, since that is said in its
    /// configuration or on its command line: that will be changed before
    #[serde(default)]
    pub unkept: bool,
    /// Even if the disk has dirty bitmaps, which stay with its old image
    #[serde(default)]
    pub leave_bitmaps: bool,
}

/// What a bitmap is to be called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewName {
    pub to: String,
}

/// What is to be dirty in a bitmap, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Merged {
    /// Other bitmaps of the disk
    pub from: Vec<String>,
}

/// What is to be done with a disk's bitmaps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BitmapOrder {
    List,
    Add {
        bitmap: String,
        granularity: Option<u64>,
    },
    Remove {
        bitmap: String,
    },
    Advance {
        bitmap: String,
        to: Option<u64>,
    },
    Clear {
        bitmap: String,
    },
    Rename {
        bitmap: String,
        to: String,
    },
    Merge {
        bitmap: String,
        from: Vec<String>,
    },
}

/// What is to be done with the internal snapshots of a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotsOrder {
    List,
    /// One of the disk as it is now.
    Take {
        snapshot: String,
    },
    /// By its name or ID.
    Delete {
        snapshot: String,
    },
}

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
    /// Keep a disk as it is now, for NBD clients: answered by a [`BackupInfo`](crate::info::BackupInfo).
    BeginBackup { id: String, order: BackupOrder },
    /// Lets users go on whom the backup of that identity holds: answered likewise.
    GoOnWithBackup { id: String },
    /// Ends the backup of that identity, which may not have begun yet: answered likewise, by its final state.
    EndBackup { id: String },
    /// Copy a disk to another one, which may take its place: answered by a [`MirrorInfo`](crate::info::MirrorInfo).
    BeginMirror(Box<MirrorOrder>),
    /// Copy what a disk has to the image below it, which may take its place: answered likewise. It is a mirror, too.
    BeginCommit(CommitOrder),
    /// Let that be: answered likewise, by what has become of it. If it is ready, and not by `force`, the target is then
    /// the disk as it was at an instant.
    EndMirror { force: bool },
    /// Have a disk's image make its own what is below it: answered by a [`StreamInfo`](crate::info::StreamInfo).
    BeginStream(StreamOrder),
    /// Let that be: answered likewise, by what has become of it.
    EndStream,
    /// Have the disk go on with the target: answered like `Show`.
    CompleteMirror(Completion),
    /// Have the disk go on with a new image on top of its own: answered like `Show`.
    Snapshot(SnapshotOrder),
    /// The first step of both: answered by the options that the disk has with that image, when its users wait.
    BeginSwitch {
        to: SwitchTo,
        /// The disk's bitmaps may stay with its old image.
        leave_bitmaps: bool,
    },
    /// The second one: they go on with it, or with what there was. Answered like `Show`.
    EndSwitch { go: bool },
    /// Dirty bitmaps: answered by those that there are then, [`Bitmaps`](crate::info::Bitmaps).
    Bitmaps(BitmapOrder),
    /// Internal snapshots: answered by those that there are then, [`Snapshots`](crate::info::Snapshots).
    Snapshots(SnapshotsOrder),
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
    /// All disks, each like `Show`: `{"disks": [disk, ...]}`.
    List,
    /// What is counted of a disk, a [`Measured`](crate::metrics::Measured).
    Measure,
    /// A disk: `{"options": what it was added by, "state": an [`Info`](crate::info::Info)}`.
    Show,
    /// Adds a disk, or changes the disk of that name as far as possible while it is served. The reply is
    /// that of `Show`, with `"created"`.
    Put {
        options: Box<DiskTable>,
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
    /// All throttle groups: `{"groups": [a [`ThrottleGroup`](crate::ThrottleGroup), ...]}`.
    ListGroups,
    /// Change options of a throttle group, for all of its disks: answered like `ListGroups` by what is
    /// of that name.
    SetGroup {
        group: String,
        options: BTreeMap<String, String>,
        temporary: bool,
    },
    /// Have another process go on with everything, of this program, or of what is now where the
    /// server's came from: `{"pid": it, "pause_ms": how long queues stood still}`.
    Upgrade {
        binary: Option<PathBuf>,
        /// End NBD clients by TLS, which cannot go along.
        disconnect: bool,
    },
    /// End the server like SIGTERM does: `{"quitting": true}`.
    Quit,
}
