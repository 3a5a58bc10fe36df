//! The state of a disk, as the API reports it.

use crate::alarm::AlarmInfo;
use crate::job_id::JobKind;
use crate::worker_info::WorkerInfo;
use fathom_control::Owner;
use fathom_formats::qcow2::snapshot::Snapshot;
use fathom_formats::served::{ImageDisk, ImageProblem as Found};
use fathom_jobs::pull::Status;
use fathom_sandbox::Report;
use fathom_stack::{BitmapStatus, FilterInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use utoipa::ToSchema;

/// State of a disk, and the process that serves it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Info {
    /// Version of the server.
    pub version: String,
    /// Process ID of the process that serves the disk.
    pub pid: u32,
    /// Name of the disk.
    pub name: String,
    /// The owner of the name; the command line copies it here from the API's reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub owner: Option<Owner>,
    /// Options in which the disk differs from its definition; the command line derives them from
    /// the API's reply.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(ignore)]
    pub changed: Vec<String>,
    /// Location of the image: a path or a URI, without passwords.
    pub disk: String,
    /// Format of the image.
    pub format: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Guests and clients can only read.
    pub read_only: bool,
    /// I/O engine, such as `io_uring`.
    pub engine: String,
    /// Name of the pool whose threads serve the disk. Null if the disk has threads of its own.
    #[serde(default)]
    pub pool: Option<String>,
    /// Cache mode: `none`, `writeback` or `writethrough`. Null if the image is not a file or
    /// device.
    pub cache: Option<String>,
    /// Number of requests whose data was copied because its alignment does not suit O_DIRECT. Null
    /// if the image is not a file or device.
    pub bounced: Option<u64>,
    /// Counters and known problems of the image. Null if the format has no tables, such as raw.
    #[serde(default)]
    pub image: Option<ImageInfo>,
    /// Process that has locked the image, as text for display. The disk cannot be used until that
    /// process releases the image. Null if no other process has locked it.
    pub held_by: Option<String>,
    /// Socket for vhost-user front-ends: a path, or `fd:N` for an inherited socket. Null if the
    /// disk has no such socket.
    pub vhost_user: Option<String>,
    /// The connected front-end. Null if no front-end is connected.
    pub front_end: Option<FrontEnd>,
    /// Maximum number of virtqueues of a front-end.
    pub max_queues: u16,
    /// Number of virtqueues that are running.
    pub queues_running: usize,
    /// The disk's NBD export. Null if the disk is not exported.
    pub nbd: Option<NbdInfo>,
    /// The file that shows the disk's contents. Null if the disk has no such file.
    #[serde(default)]
    pub fuse: Option<FuseInfo>,
    /// Filters of the disk, from the one closest to the guest to the one closest to the image.
    #[schema(value_type = Vec<Object>)]
    pub filters: Vec<FilterInfo>,
    /// Counters of each worker of the disk.
    pub workers: Vec<WorkerInfo>,
    /// Path of the file to which requests are traced. Null if no trace is in progress.
    #[schema(value_type = Option<String>)]
    pub trace: Option<PathBuf>,
    /// Alarms of the disk.
    #[serde(default)]
    pub alarms: Vec<AlarmInfo>,
    /// Progress of the move of this disk from another server to this server. Null if the disk has
    /// no such move.
    #[serde(default)]
    pub pull: Option<PullInfo>,
    /// Another server has taken the disk over, and no guest can use the disk here.
    #[serde(default)]
    pub moved: bool,
    /// The disk's backup, which is in progress or has failed. Null if the disk has none.
    #[serde(default)]
    pub backup: Option<BackupInfo>,
    /// The disk's mirror or commit. Null if the disk has none.
    #[serde(default)]
    pub mirror: Option<MirrorInfo>,
    /// The disk's job that begins and does not run yet. Null if the disk has none.
    #[serde(default)]
    pub starting: Option<StartingJob>,
    /// The disk's stream, or commit of images in the middle of the backing chain. Null if the disk
    /// has none.
    #[serde(default)]
    pub stream: Option<StreamInfo>,
    /// Why the disk's previous image could not be marked as superseded. Without the mark, another
    /// server may write to that image. Null if the image is marked, or if the disk has not been
    /// switched to another image.
    #[serde(default)]
    pub unmarked: Option<String>,
    /// The disk is frozen: requests wait until it is thawed.
    #[serde(default)]
    pub frozen: bool,
    /// Time since the server was started, in seconds. An upgrade of the server does not reset this
    /// time.
    pub uptime_seconds: u64,
    /// Restrictions of the process that serves the disk, which confine an attacker who controls one
    /// of its threads. Null without a sandbox.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub sandbox: Option<Report>,
    /// Limits and usage of the disk's tenant, for all of the tenant's disks together. Null if the
    /// tenant has no limits.
    #[serde(default)]
    pub limits: Option<TenantLimits>,
}

/// A job of a disk that begins and does not run yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StartingJob {
    /// Kind of the job.
    pub kind: JobKind,
    /// Number of the job, which no other job has.
    pub id: String,
    /// Future target of a mirror, backing image of a stream, or image that a commit writes to.
    pub target: Option<String>,
    /// Maximum number of bytes copied per second. Null if there is no limit.
    pub speed: Option<u64>,
}

/// Progress of the move of a disk from another server to this server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PullInfo {
    /// Phase of the move:
    ///
    /// - `copying`: the guest runs on the source server, and data is copied.
    /// - `ready`: the guest can migrate. The rest can be copied in a moment, or follows the guest
    ///   (post-copy).
    /// - `switching`: the disk has been taken over, and the guest waits until the rest is copied.
    /// - `arriving`: the disk has been taken over, and the guest runs here while the rest is
    ///   copied.
    /// - `done`: all data is here.
    pub phase: String,
    /// Number of bytes copied, including repeated copies.
    pub copied: u64,
    /// Number of bytes still to be copied, as far as known.
    pub left: u64,
    /// Maximum number of bytes copied per second. Null if there is no limit.
    #[serde(default)]
    pub speed: Option<u64>,
    /// Why the move makes no progress at present: the server retries. Null if it has no problem.
    #[serde(default)]
    pub problem: Option<String>,
}

impl PullInfo {
    /// Returns the progress of a move with this limit.
    pub fn new(status: Status, speed: Option<u64>) -> PullInfo {
        PullInfo {
            phase: status.phase.name().to_owned(),
            copied: status.copied,
            left: status.left,
            speed,
            problem: status.problem,
        }
    }
}

/// Internal snapshots of a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    /// The snapshots, in the order in which they were taken.
    pub snapshots: Vec<SnapshotInfo>,
}

/// An internal snapshot: the contents of the disk at an instant, stored in the disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// ID of the snapshot, which is unique in the image.
    pub id: String,
    /// Name of the snapshot.
    pub name: String,
    /// Time of the snapshot, in nanoseconds since 1970.
    pub taken: u64,
    /// Size of the disk at that time, in bytes. Null if the snapshot has no size of its own: then
    /// the disk had its present size.
    pub size: Option<u64>,
    /// Size of the virtual machine's state that QEMU has saved with the snapshot, in bytes. 0
    /// without such a state.
    pub vm_state: u64,
}

impl From<&Snapshot> for SnapshotInfo {
    fn from(snapshot: &Snapshot) -> SnapshotInfo {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (seconds, nanos) = snapshot.date;
        SnapshotInfo {
            id: text(&snapshot.id),
            name: text(&snapshot.name),
            taken: u64::from(seconds) * 1_000_000_000 + u64::from(nanos),
            size: snapshot.disk_size(),
            vm_state: snapshot.vm_state_size(),
        }
    }
}

/// Dirty bitmaps of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Bitmaps {
    /// The bitmaps, by name.
    pub bitmaps: Vec<BitmapInfo>,
}

/// A dirty bitmap, which records the blocks of a disk that have changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BitmapInfo {
    /// Name of the bitmap.
    pub name: String,
    /// Number of bytes that a bit covers.
    pub granularity: u64,
    /// Number of bytes that count as changed.
    pub dirty: u64,
    /// Time when the bitmap began, in nanoseconds since 1970. Null if unknown, because the bitmap
    /// comes from the image.
    pub since: Option<u64>,
    /// `successor` of the backup to which the bitmap can advance: the time of that backup, in
    /// nanoseconds since 1970. Null without such a backup.
    #[serde(default)]
    pub advances_to: Option<u64>,
    /// Why the whole disk counts as changed. Null if the bitmap is complete.
    #[serde(default)]
    pub problem: Option<String>,
}

impl From<BitmapStatus> for BitmapInfo {
    fn from(status: BitmapStatus) -> BitmapInfo {
        BitmapInfo {
            name: status.name,
            granularity: status.granularity,
            dirty: status.dirty,
            since: status.since,
            advances_to: status.successor,
            problem: status.problem,
        }
    }
}

/// A mirror: a disk is copied to a target while the disk is in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirrorInfo {
    /// Number of the mirror, which no other job has: the last part of its identity in `/v1/jobs`.
    #[serde(default)]
    pub id: String,
    /// Location of the target: a path or a URI, without passwords.
    pub target: String,
    /// Format of the target.
    pub format: String,
    /// Phase of the mirror:
    ///
    /// - `copying`: data is copied, and copied again when it changes.
    /// - `ready`: the disk can be switched to the target.
    /// - `waiting`: the virtual machine has released the disk. The mirror continues when the
    ///   machine is back.
    /// - `stopping`: the mirror was ended, and waits for requests in flight.
    /// - `done`: the mirror was ended, and the target is complete.
    /// - `failed`: the target is unusable.
    pub phase: String,
    /// Number of bytes copied, including repeated copies.
    pub copied: u64,
    /// Number of bytes still to be copied, as far as known.
    pub left: u64,
    /// Maximum number of bytes copied per second. Null if there is no limit.
    #[serde(default)]
    pub speed: Option<u64>,
    /// After the first complete copy, guests and clients are slowed down to the speed of the
    /// copying.
    pub active: bool,
    /// Time since the mirror began, in seconds.
    pub seconds: u64,
    /// Why the mirror has failed. Null if it has not failed.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A stream, or a commit of images in the middle of the backing chain. A stream copies data from
/// backing images into the disk's top image. A commit copies data from `top` and the images below
/// it into `base`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamInfo {
    /// Number of the job, which no other job has: the last part of its identity in `/v1/jobs`.
    #[serde(default)]
    pub id: String,
    /// Path of the backing image after the stream, or of the image that the commit writes to. Null
    /// if the disk's image will have no backing image.
    pub base: Option<String>,
    /// Path of the topmost image that the commit merges. After the commit, the chain has neither
    /// the image `top` nor the images between `top` and `base`. Null for a stream.
    #[serde(default)]
    pub top: Option<String>,
    /// Phase of the job:
    ///
    /// - `copying`: data is copied.
    /// - `waiting`: the virtual machine has released the disk. The job continues when the machine
    ///   is back.
    /// - `finishing`: all data is copied, and the disk closes the images that it no longer needs.
    /// - `stopping`: the job was ended, and waits for requests in flight.
    /// - `done`: the disk has its new backing chain.
    /// - `failed`: the job ended before that.
    pub phase: String,
    /// Number of bytes copied.
    pub copied: u64,
    /// Number of bytes of the disk still to be examined, or for a commit still to be copied.
    pub left: u64,
    /// Maximum number of bytes copied per second. Null if there is no limit.
    #[serde(default)]
    pub speed: Option<u64>,
    /// Time since the job began, in seconds.
    pub seconds: u64,
    /// Why the job has failed, or why a `finishing` job does not end. Null if it has no problem.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A backup: NBD clients can read the contents that the disk had when the backup began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BackupInfo {
    /// Identity of the backup, which no other backup has. The request that ends the backup names
    /// it.
    #[serde(default)]
    pub id: String,
    /// NBD URI at which clients read the backup. The export's name is the backup's identity, so
    /// that a client that connects again never reads another backup.
    pub uri: String,
    /// Time since the backup began, in seconds.
    pub seconds: u64,
    /// Number of bytes in the scratch file: data that guests and clients have overwritten since the
    /// backup began.
    pub kept: u64,
    /// Name of the dirty bitmap that can advance to this backup when it has ended. Null if the
    /// backup has no bitmap.
    #[serde(default)]
    pub bitmap: Option<String>,
    /// Number that identifies this backup when the bitmap advances to it (`to`). Null if the backup
    /// has no bitmap.
    #[serde(default)]
    pub successor: Option<u64>,
    /// Why the backup has failed: data that was read from it must not be used. Null if it has not
    /// failed.
    #[serde(default)]
    pub problem: Option<String>,
}

/// Counters and known problems of an image with tables, such as qcow2. The counters begin at 0 when
/// the image is opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Number of reads of 4 KiB of the tables that were not in memory, including the tables of
    /// backing images.
    pub table_reads: u64,
    /// Number of clusters that were allocated.
    pub clusters_allocated: u64,
    /// Number of clusters that were freed.
    pub clusters_freed: u64,
    /// Known problems of the image and its backing images. The server detects problems when it
    /// opens the image, when a guest or client begins to use the disk, and during requests. For a
    /// complete check, use `fathom img check`.
    #[serde(default)]
    pub problems: BTreeSet<ImageProblem>,
}

impl ImageInfo {
    /// Returns the counters, or `None` if the image has no tables.
    pub fn of(image: &ImageDisk) -> Option<ImageInfo> {
        let counts = image.counts()?;
        Some(ImageInfo {
            table_reads: counts.table_reads(),
            clusters_allocated: counts.allocated(),
            clusters_freed: counts.freed(),
            problems: image.problems().into_iter().map(Into::into).collect(),
        })
    }
}

/// A problem of a disk's image:
///
/// - `leaks`: the image was not closed after a write, so clusters may be leaked.
/// - `damage`: the image is damaged.
/// - `backing-damage`: a backing image is damaged. The server's log names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageProblem {
    /// The image was not closed after it was written to: clusters may be leaked, which take space
    /// and do no other harm. `fathom img check --repair leaks` gives the space back.
    Leaks,
    /// The image is marked as corrupt, or damage was found in it. `fathom img check --repair all`
    /// repairs it.
    Damage,
    /// The same of an image below the disk's own; the log names it.
    BackingDamage,
}

impl ImageProblem {
    /// Describes the problem, and what repairs the image.
    pub fn describe(self) -> &'static str {
        match self {
            ImageProblem::Leaks => {
                "the image was not closed after a write, so clusters may be leaked; run 'fathom \
                 img check --repair leaks' when the disk is not in use"
            }
            ImageProblem::Damage => {
                "the image is damaged; stop using the disk, and run 'fathom img check --repair \
                 all'"
            }
            ImageProblem::BackingDamage => {
                "a backing image of the disk, named in the log, is damaged; run 'fathom img \
                 check --repair all' on that image"
            }
        }
    }
}

impl From<Found> for ImageProblem {
    fn from(found: Found) -> ImageProblem {
        match found {
            Found::Leaks => ImageProblem::Leaks,
            Found::Damage => ImageProblem::Damage,
            Found::BackingDamage => ImageProblem::BackingDamage,
        }
    }
}

/// Limits and usage of a tenant's processes, as the kernel reports them. A limit that is not set is
/// null. A usage is null if the kernel does not report it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TenantLimits {
    /// Maximum memory in bytes.
    pub memory_max: Option<u64>,
    /// Memory in use, in bytes.
    pub memory: Option<u64>,
    /// Maximum CPU time, in percent of one CPU.
    pub cpu_max_percent: Option<u64>,
    /// Time that the processes were throttled because of the CPU limit, in milliseconds.
    pub cpu_held_back_ms: Option<u64>,
    /// Maximum number of processes and threads.
    pub tasks_max: Option<u64>,
    /// Number of processes and threads.
    pub tasks: Option<u64>,
}

impl Info {
    /// Describes the users of the disk, for display. Returns `None` if the disk has no users.
    pub fn users(&self) -> Option<String> {
        let front_end = self.front_end.as_ref().map(|one| match one.pid {
            0 => "a front-end".to_owned(),
            pid => format!("process {pid}"),
        });
        let clients = self.nbd.as_ref().map_or(0, |nbd| nbd.connections.len());
        let clients = match clients {
            0 => None,
            1 => Some("an NBD client".to_owned()),
            n => Some(format!("{n} NBD clients")),
        };
        let files = { self.fuse.iter() }.find(|fuse| fuse.open > 0);
        let files = files.map(|_| "programs by its file".to_owned());
        let is_backed_up = |backup: &&BackupInfo| backup.problem.is_none();
        let backup = self.backup.as_ref().filter(is_backed_up);
        let backup = backup.map(|_| "a backup".to_owned());
        let goes_on = |phase: &str| !["done", "failed"].contains(&phase);
        let mirror = { self.mirror.iter() }.find(|mirror| goes_on(&mirror.phase));
        let mirror = mirror.map(|_| "a mirror".to_owned());
        let stream = { self.stream.iter() }.find(|stream| goes_on(&stream.phase));
        let stream = stream.map(|_| "a stream".to_owned());
        let users = front_end.into_iter().chain(clients).chain(files);
        let users: Vec<_> = users.chain(backup).chain(mirror).chain(stream).collect();
        (!users.is_empty()).then(|| users.join(" and "))
    }
}

/// A vhost-user front-end that is connected to a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FrontEnd {
    /// Process ID of the front-end. 0 if the process is in a PID namespace that is not visible to
    /// the server.
    pub pid: i32,
}

/// The NBD export of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NbdInfo {
    /// Addresses at which the server accepts NBD clients.
    pub addresses: Vec<String>,
    /// Clients can use TLS.
    pub tls: bool,
    /// Name of the export.
    pub export: String,
    /// Connections of clients to the export.
    pub connections: Vec<ConnectionInfo>,
}

/// The file that shows a disk's contents, by FUSE.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FuseInfo {
    /// Path of the file, over which the disk is mounted.
    #[schema(value_type = String)]
    pub file: PathBuf,
    /// Programs can write to the file.
    pub writable: bool,
    /// Number of times that programs have the file open.
    pub open: u64,
}

/// A connection of an NBD client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionInfo {
    /// The client, such as `process 17`, `192.0.2.1:4000` or `vsock 3:1025`.
    pub client: String,
    /// Index of the worker that serves the connection.
    pub worker: usize,
    /// The connection uses TLS.
    pub encrypted: bool,
    /// Time since the server accepted the connection, in seconds.
    pub seconds: u64,
}
