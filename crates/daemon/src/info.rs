//! What is told of a disk.

use crate::alarm::AlarmInfo;
use crate::owner::Owner;
use fathom_core::{Clock, Counter, WorkerHandle};
use fathom_formats::qcow2::snapshot::Snapshot;
use fathom_formats::served::{ImageDisk, ImageProblem as Found};
use fathom_jobs::pull::Status;
use fathom_sandbox::Report;
use fathom_stack::{BitmapStatus, FilterInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use utoipa::ToSchema;

/// A disk and its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Info {
    pub version: String,
    pub pid: u32,
    /// What the disk is asked for by.
    pub name: String,
    /// Who owns that name; the command line copies it here from the API's reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub owner: Option<Owner>,
    /// Where its bytes are.
    pub disk: String,
    pub format: String,
    /// Bytes.
    pub size: u64,
    /// Bytes.
    pub block_size: u32,
    pub read_only: bool,
    pub engine: String,
    /// Whose threads serve it; None: its own.
    #[serde(default)]
    pub pool: Option<String>,
    /// None for disks that have no files.
    pub cache: Option<String>,
    /// Requests whose data was copied because O_DIRECT could not take it as
    /// it lay in memory or on the disk; None for disks that have no files.
    pub bounced: Option<u64>,
    /// What is counted and known of an image that has tables.
    #[serde(default)]
    pub image: Option<ImageInfo>,
    /// Who else has the image, for people: until it lets go, nobody can use
    /// the disk here.
    pub held_by: Option<String>,
    /// Where front-ends connect; None: nowhere.
    pub vhost_user: Option<String>,
    /// Who is connected.
    pub front_end: Option<FrontEnd>,
    /// The most virtqueues that a front-end may use.
    pub max_queues: u16,
    pub queues_running: usize,
    /// None: it is not served by NBD.
    pub nbd: Option<NbdInfo>,
    /// In the order in which requests meet them.
    #[schema(value_type = Vec<Object>)]
    pub filters: Vec<FilterInfo>,
    pub workers: Vec<WorkerInfo>,
    /// The file being traced to.
    #[schema(value_type = Option<String>)]
    pub trace: Option<PathBuf>,
    /// What its alarms are, and whether they are raised.
    #[serde(default)]
    pub alarms: Vec<AlarmInfo>,
    /// How far it is on its way here from another server; None: it is not on its way.
    #[serde(default)]
    pub pull: Option<PullInfo>,
    /// Another server has taken it over: no guest can have it here.
    #[serde(default)]
    pub moved: bool,
    /// It is kept as it was when a backup of it began; None: it is not.
    #[serde(default)]
    pub backup: Option<BackupInfo>,
    /// It is copied to another one, which may take its place; None: it is not.
    #[serde(default)]
    pub mirror: Option<MirrorInfo>,
    /// What is below its image becomes its own.
    #[serde(default)]
    pub stream: Option<StreamInfo>,
    /// Why the image that the disk had before it was switched to this one is not marked as superseded: nothing keeps
    /// another server from writing to that image. None: it is marked, or there was none.
    #[serde(default)]
    pub unmarked: Option<String>,
    /// It stands still, and who uses it waits.
    #[serde(default)]
    pub frozen: bool,
    pub uptime_seconds: u64,
    /// What holds back a thread of this process that somebody has taken over.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub sandbox: Option<Report>,
    /// What the tenant that has the disk may use of the machine, with all of its disks; None: there
    /// is no limit.
    #[serde(default)]
    pub limits: Option<TenantLimits>,
}

/// A disk on its way here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PullInfo {
    /// `copying`; `ready`: its guest may come; `switching`: it has been taken over, and the rest comes;
    /// `arriving`: its guest is here already; `done`.
    pub phase: String,
    /// Bytes that have been copied, some of them several times.
    pub copied: u64,
    /// Bytes that are still to be copied, as far as is known.
    pub left: u64,
    /// Why it does not go on; it is tried again.
    #[serde(default)]
    pub problem: Option<String>,
}

impl From<Status> for PullInfo {
    fn from(status: Status) -> PullInfo {
        PullInfo {
            phase: status.phase.name().to_owned(),
            copied: status.copied,
            left: status.left,
            problem: status.problem,
        }
    }
}

/// Internal snapshots of a disk's image, in the order in which they were taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    pub snapshots: Vec<SnapshotInfo>,
}

/// The disk as it was at an instant, kept in its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Unique in its image.
    pub id: String,
    pub name: String,
    /// When it was taken (nanoseconds since 1970).
    pub taken: u64,
    /// Bytes of the disk then; null: as many as it has now.
    pub size: Option<u64>,
    /// Bytes of the state of its virtual machine, which QEMU has kept with it.
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

/// A disk's dirty bitmaps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Bitmaps {
    pub bitmaps: Vec<BitmapInfo>,
}

/// What has been changed since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BitmapInfo {
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Bytes that count as changed.
    pub dirty: u64,
    /// When it was begun (nanoseconds since 1970); null where only the image had it meanwhile.
    pub since: Option<u64>,
    /// A backup with it has begun and not failed, to which it may advance: when (nanoseconds since 1970).
    #[serde(default)]
    pub advances_to: Option<u64>,
    /// Why all counts as changed.
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

/// A disk that is copied to another one while it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirrorInfo {
    /// Where that is.
    pub target: String,
    pub format: String,
    /// `copying` (again), `ready` (to be switched over), `waiting` (for its virtual machine), `stopping` (ended, and
    /// waiting for requests in flight), `done`, or `failed`.
    pub phase: String,
    /// Bytes that have been copied, some of them several times.
    pub copied: u64,
    /// Bytes that are still to be copied, as far as is known.
    pub left: u64,
    /// Users change no more than is copied meanwhile.
    pub active: bool,
    /// For so long.
    pub seconds: u64,
    /// Why the target is of no use.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A disk whose image makes its own what is below it, or of which some images go into one below.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamInfo {
    /// What it will have below it.
    pub base: Option<String>,
    /// What comes down into the base, with what is between, and will not be of the disk any more; none: what is above the base
    /// comes up.
    #[serde(default)]
    pub top: Option<String>,
    /// `copying`, `waiting` (for its virtual machine), `finishing` (letting go of what is not below it any more), `stopping`
    /// (ended, and waiting for requests in flight), `done`, or `failed`.
    pub phase: String,
    /// Bytes that have come up or down.
    pub copied: u64,
    /// Bytes of the disk that are still to be looked at, or to come down.
    pub left: u64,
    /// For so long.
    pub seconds: u64,
    /// Why it has failed.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A disk that is kept as it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BackupInfo {
    /// The backup's identity, which no other backup has: whoever ends the backup names it.
    #[serde(default)]
    pub id: String,
    /// Where NBD clients read it. The export's name is the backup's identity, so that a client which connects again
    /// never gets another backup.
    pub uri: String,
    /// For so long.
    pub seconds: u64,
    /// Bytes that users have changed since, and that are kept somewhere else.
    pub kept: u64,
    /// The bitmap that may advance to it when it has ended.
    #[serde(default)]
    pub bitmap: Option<String>,
    /// What that is known by.
    #[serde(default)]
    pub successor: Option<u64>,
    /// Why it has failed: what was read is not to be used.
    #[serde(default)]
    pub problem: Option<String>,
}

/// Of an image, since its disk was opened here; the counts only grow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// How often 4 KiB of its tables were not in memory; of backing files, too.
    pub table_reads: u64,
    /// Clusters that were taken into use, and that can be taken again.
    pub clusters_allocated: u64,
    pub clusters_freed: u64,
    /// What is wrong with the image and those below it, as far as that is known without a check. Learnt when the disk
    /// is opened, each time that it is taken into use, and while it is used.
    #[serde(default)]
    pub problems: BTreeSet<ImageProblem>,
}

impl ImageInfo {
    /// None: the image has no tables.
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

/// A problem of a disk's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageProblem {
    /// The image was not closed after it was written to: clusters may be leaked, which take space and do no other harm.
    /// `fathom img check --repair leaks` gives the space back.
    Leaks,
    /// The image is marked as corrupt, or damage was found in it. `fathom img check --repair all` repairs it.
    Damage,
    /// The same of an image below the disk's own; the log names it.
    BackingDamage,
}

impl ImageProblem {
    /// The problem and what repairs the image.
    pub fn describe(self) -> &'static str {
        match self {
            ImageProblem::Leaks => {
                "the image was not closed after it was written to, and clusters may be leaked (fathom img check \
                 --repair leaks, while nobody uses the image)"
            }
            ImageProblem::Damage => {
                "the image is damaged: stop using it and repair it (fathom img check --repair all)"
            }
            ImageProblem::BackingDamage => {
                "an image below the disk's own is damaged, which the log names: repair that image (fathom img check \
                 --repair all)"
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

/// As the kernel says it. None: there is no such limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TenantLimits {
    /// Bytes.
    pub memory_max: Option<u64>,
    pub memory: Option<u64>,
    /// Of one CPU's time.
    pub cpu_max_percent: Option<u64>,
    /// For so long it has waited because of that.
    pub cpu_held_back_ms: Option<u64>,
    /// Processes and threads.
    pub tasks_max: Option<u64>,
    pub tasks: Option<u64>,
}

impl Info {
    /// Who is connected, for people; None: nobody.
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
        let is_backed_up = |backup: &&BackupInfo| backup.problem.is_none();
        let backup = self.backup.as_ref().filter(is_backed_up);
        let backup = backup.map(|_| "a backup".to_owned());
        let goes_on = |phase: &str| !["done", "failed"].contains(&phase);
        let mirror = { self.mirror.iter() }.find(|mirror| goes_on(&mirror.phase));
        let mirror = mirror.map(|_| "a mirror".to_owned());
        let stream = { self.stream.iter() }.find(|stream| goes_on(&stream.phase));
        let stream = stream.map(|_| "a stream".to_owned());
        let users = front_end.into_iter().chain(clients).chain(backup);
        let users: Vec<_> = users.chain(mirror).chain(stream).collect();
        (!users.is_empty()).then(|| users.join(" and "))
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FrontEnd {
    /// Its process; 0 when it is in a PID namespace that is not visible.
    pub pid: i32,
}

/// NBD, as far as it concerns one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NbdInfo {
    /// Where clients connect.
    pub addresses: Vec<String>,
    /// Whether clients can use TLS.
    pub tls: bool,
    /// The disk's name for clients.
    pub export: String,
    pub connections: Vec<ConnectionInfo>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionInfo {
    /// An address, or a process.
    pub client: String,
    /// Which of the disk's workers serves it.
    pub worker: usize,
    pub encrypted: bool,
    /// Since it was accepted.
    pub seconds: u64,
}

/// Counted since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerInfo {
    /// Requests that were answered.
    pub requests: u64,
    /// Interrupts sent.
    pub notifications: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
    /// Ns in which it looked for work instead of sleeping.
    #[serde(default)]
    pub polled_ns: u64,
    /// Times that it did so and found some, and that it did not.
    #[serde(default)]
    pub polls_paid: u64,
    #[serde(default)]
    pub polls_vain: u64,
    /// Wake-ups by guests that had work.
    #[serde(default)]
    pub kicks: u64,
    /// Requests that were taken together: how often at most 1, 2, 4 and so on, the last any number.
    #[serde(default)]
    pub batches: Vec<u64>,
    /// Ns of a CPU that its thread has used; None: others' workers are on that thread, too.
    #[serde(default)]
    pub cpu_ns: Option<u64>,
}

impl WorkerInfo {
    pub(crate) fn of(worker: &WorkerHandle, is_alone: bool) -> WorkerInfo {
        let counters = worker.counters();
        let cpu = worker.thread_id().cpu_time().filter(|_| is_alone);
        WorkerInfo {
            requests: counters.answered.get(),
            notifications: counters.notifications.get(),
            sleeps: counters.sleeps.get(),
            polled_ns: Clock::get().ns(counters.polled.get()),
            polls_paid: counters.polls_paid.get(),
            polls_vain: counters.polls_vain.get(),
            kicks: counters.kicks.get(),
            batches: counters.batches.iter().map(Counter::get).collect(),
            cpu_ns: cpu.map(|cpu| cpu.as_nanos() as u64),
        }
    }

    /// With what one before it has done.
    pub(crate) fn and(self, before: &WorkerInfo) -> WorkerInfo {
        let before_of = |size| before.batches.get(size).copied().unwrap_or(0);
        let batches = self.batches.iter().enumerate();
        let batches = batches.map(|(size, n)| n + before_of(size)).collect();
        WorkerInfo {
            requests: self.requests + before.requests,
            notifications: self.notifications + before.notifications,
            sleeps: self.sleeps + before.sleeps,
            polled_ns: self.polled_ns + before.polled_ns,
            polls_paid: self.polls_paid + before.polls_paid,
            polls_vain: self.polls_vain + before.polls_vain,
            kicks: self.kicks + before.kicks,
            batches,
            cpu_ns: { self.cpu_ns }.map(|own| own + before.cpu_ns.unwrap_or(0)),
        }
    }
}
