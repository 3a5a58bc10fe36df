//! Replies to requests: of a disk's host to the controller, of a tenant's process to the
//! supervisor, and of the controller to the API.

use fathom_control::{ErrorKind, Owner, RequestError};
use fathom_metrics::JobInfo;
use fathom_metrics::{BackupInfo, Bitmaps, Info, MirrorInfo, Snapshots, StreamInfo};
use fathom_metrics::{Measured, Sent};
use fathom_spec::DiskSpec;
use fathom_stack::FilterInfo;
use fathom_trace::{SlowRequest, Summary};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A reply, or why the request failed.
pub type Answer = Result<Reply, RequestError>;

/// Takes the reply to a request.
pub type Responder = Box<dyn FnOnce(Answer) + Send>;

/// Defines [`Reply`], and converts it from and into each of its contents.
macro_rules! replies {
    ($($kind:ident($content:ty),)*) => {
        /// The content of a reply. In JSON it is the content alone: the requester knows the kind.
        #[derive(Debug, Serialize)]
        #[serde(untagged)]
        pub enum Reply {
            $(
                /// The reply has content of this type.
                $kind(Box<$content>),
            )*
        }

        $(impl From<$content> for Reply {
            fn from(content: $content) -> Reply {
                Reply::$kind(Box::new(content))
            }
        }

        impl TryFrom<Reply> for $content {
            type Error = RequestError;

            fn try_from(reply: Reply) -> Result<$content, RequestError> {
                match reply {
                    Reply::$kind(content) => Ok(*content),
                    _ => Err(ErrorKind::Failed.because("the reply is of another kind")),
                }
            }
        })*
    };
}

replies! {
    Done(Done),
    Shown(Shown),
    Disk(Disk),
    Disks(Disks),
    Options(DiskSpec),
    Statistics(Statistics),
    SlowRequests(SlowRequests),
    Measured(Measured),
    Sent(Sent),
    Trace(TraceState),
    Size(Size),
    Frozen(Frozen),
    Filter(Filter),
    Bitmaps(Bitmaps),
    Snapshots(Snapshots),
    Backup(BackupInfo),
    Mirror(MirrorInfo),
    Stream(StreamInfo),
    Job(JobInfo),
    ThrottleGroups(ThrottleGroups),
    Successor(Successor),
}

/// The request has succeeded, and there is no more to say.
#[derive(Debug, Default, Serialize)]
pub struct Done {}

/// A disk as its host shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shown {
    /// Options with which the disk is served, without options at their defaults.
    pub options: DiskSpec,
    /// State of the disk.
    pub state: Info,
    /// The request has added the disk.
    #[serde(skip)]
    pub created: bool,
}

/// A disk: its options, its owner and its state.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Disk {
    /// Options with which the disk is served, without options at their defaults.
    pub options: DiskSpec,
    /// Options that the disk has after a restart of the server, as its definition says. Null for a
    /// transient disk.
    pub definition: Option<DiskSpec>,
    /// The disk is served again after a restart of the server. False for a transient disk.
    pub kept: bool,
    /// Owner of the disk's name. Changes of a static disk last until the server restarts.
    pub owner: Owner,
    /// State of the disk.
    pub state: Info,
    /// The request has added the disk.
    #[serde(skip)]
    pub created: bool,
}

/// All disks of a server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Disks {
    /// The disks, in the order in which they were added.
    pub disks: Vec<Disk>,
    /// Disks that are defined, but not served.
    pub failed: Vec<FailedDisk>,
}

/// A disk that is defined, but could not be opened, or has contradictory definitions.
#[derive(Debug, Serialize, ToSchema)]
pub struct FailedDisk {
    /// Name of the disk.
    pub name: String,
    /// Owner of the disk's name.
    pub owner: Owner,
    /// Options of the disk. Null if there is no definition that can be used.
    pub options: Option<DiskSpec>,
    /// Why the disk is not served.
    pub problem: String,
    /// The server tries again by itself, at most once a minute. False: only a change of the
    /// definition can help.
    pub retried: bool,
}

/// Time that requests spent in each stage, by operation: the output of `fathom stats --json`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Statistics {
    /// Times of the disk's requests, as fields of this object.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub summary: Summary,
    /// `static` in the reply to a removal that lasts until the server restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

impl From<Summary> for Reply {
    fn from(summary: Summary) -> Reply {
        let owner = None;
        Statistics { summary, owner }.into()
    }
}

/// The slowest recent requests of a disk, the slowest first.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowRequests {
    /// The requests, the slowest first.
    #[schema(value_type = Vec<SlowRequestSchema>)]
    pub requests: Vec<SlowRequest>,
}

/// A slow request, with the time that it spent in each stage.
#[derive(ToSchema)]
#[schema(as = SlowRequest)]
#[allow(dead_code, reason = "it describes a type of another crate")]
struct SlowRequestSchema {
    /// Identifier of the request. The exemplars of metrics have the same identifier.
    id: String,
    /// Time of the request's completion, in milliseconds since 1970.
    time_ms: u64,
    /// Name of the operation, such as `read`.
    op: String,
    /// Offset of the request's data in the disk, in bytes.
    offset: u64,
    /// Length of the request's data in bytes.
    len: u64,
    /// Index of the virtqueue, or number of the NBD connection.
    queue: u16,
    /// 0, or the errno with which the request failed.
    error: i32,
    /// The worker found the request by polling, without a notification from the guest.
    polled: bool,
    /// Duration of the request in nanoseconds.
    total_ns: u64,
    /// Time in each stage in nanoseconds: `wake`, `queue`, `map`, `device`, `finish` and `notify`.
    stages: BTreeMap<String, u64>,
    /// Name of the stage in which the request spent the most time.
    longest: String,
}

/// A trace that is in progress, or none.
#[derive(Debug, Serialize)]
pub struct TraceState {
    /// Path of the trace file. `None`: no trace is in progress.
    pub trace: Option<PathBuf>,
}

/// Size of a disk after a resize.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Owner of the disk's name: `static` if the disk has this size only until the server restarts.
    /// Absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

/// Result of a freeze or a thaw.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Frozen {
    /// The disk is frozen.
    pub frozen: bool,
}

/// A filter, with those of its options that are not at their defaults.
#[derive(Debug, Serialize, ToSchema)]
pub struct Filter {
    /// Name of the filter, such as `throttle`.
    pub name: String,
    /// Values of the options, by name.
    pub options: BTreeMap<String, String>,
    /// Time that all workers together have delayed requests because of the filter's limits, in
    /// nanoseconds. Absent if the filter does not count this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_ns: Option<u64>,
    /// Owner of the disk's name: `static` in the reply to a change that lasts until the server
    /// restarts. Absent in other replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

impl Filter {
    /// Returns the reply about a filter. `owner` is the owner to show; see [`Filter::owner`].
    pub fn new(info: FilterInfo, owner: Option<Owner>) -> Filter {
        let FilterInfo {
            name,
            options,
            held_ns,
        } = info;
        Filter {
            name,
            options,
            held_ns,
            owner,
        }
    }

    /// Returns the filter without its owner.
    pub fn info(self) -> FilterInfo {
        let Filter {
            name,
            options,
            held_ns,
            owner: _,
        } = self;
        FilterInfo {
            name,
            options,
            held_ns,
        }
    }
}

/// Throttle groups of a server.
#[derive(Debug, Serialize, ToSchema)]
pub struct ThrottleGroups {
    /// The groups, by name and tenant.
    pub groups: Vec<ThrottleGroup>,
}

/// A throttle group: disks that share limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ThrottleGroup {
    /// Name of the group.
    pub name: String,
    /// Tenant of the disks: each tenant has groups of its own. Absent if the server has no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Names of the disks.
    pub disks: BTreeSet<String>,
    /// Limits that are not at their defaults, by option of the filter `throttle`.
    pub options: BTreeMap<String, String>,
}

/// The new server process after an upgrade.
#[derive(Debug, Serialize, ToSchema)]
pub struct Successor {
    /// Process ID of the new process.
    pub pid: u32,
    /// Time for which virtqueues were stopped, in milliseconds. For a server with tenants: the
    /// longest of the tenants' times.
    pub pause_ms: f64,
    /// Results of the tenants' upgrades, by tenant. Absent if the server has no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<TenantSuccessor>>,
}

/// The process of a tenant after an upgrade of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct TenantSuccessor {
    /// Name of the tenant.
    pub tenant: String,
    /// Process ID of the tenant's process. Null if the process is being started.
    pub pid: Option<u32>,
    /// Time for which the tenant's virtqueues were stopped, in milliseconds. Absent if the handover
    /// failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// Why the tenant keeps its old process, or has a new process without a handover. Absent if the
    /// handover succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}
