//! The protocol between a server and its successor.
//!
//! ```text
//! old                                  successor
//!                          ◄── Hello    which versions it understands
//! State, files ──►                      opens disks, maps memory, checks all of it
//!                          ◄── Prepared
//! (queues and NBD clients stop, disks are closed)
//! Stopped, files ──►                    takes the disks into use
//!                          ◄── Active
//! Go ──►                                serves
//! ```
//!
//! Until `Stopped`, everything belongs to the predecessor, which continues after any failure. After
//! `Stopped`, the predecessor continues only after it has killed the successor. `Go`, or the end of
//! the predecessor, tells the successor that this will not happen any more.

use super::part_records::PartRecords;
use crate::users::User;
use fathom_api::ApiState;
use fathom_control::{Definition, Definitions};
use fathom_exports::nbd::ClientState;
use fathom_exports::vhost_user::ExportState;
use fathom_files::UsedFile;
use fathom_metrics::DiskCounts;
use fathom_sockets::ListenerState;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Version of these messages. The version changes when a successor that does not know the change
/// could not continue correctly.
pub const VERSION: u32 = 1;

/// Version of a server with a disk whose parts hand over state: `DiskState::lent`, `Stopped::left`.
pub const WITH_PARTS: u32 = 2;

/// Version of a server that has received a part of a front-end's message: an older successor would
/// lose that part.
pub const WITH_UNFINISHED_MESSAGES: u32 = 3;

/// Version of a server whose front-end uses packed virtqueues: an older successor knows only split
/// ones.
pub const WITH_PACKED_QUEUES: u32 = 4;

/// Maximum time of a handover between two processes of a tenant.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The first message, from the successor.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest version of the messages that the successor understands.
    pub oldest: u32,
    /// Newest version of the messages that the successor understands.
    pub newest: u32,
}

impl Hello {
    /// The versions that this program understands.
    pub const OURS: Hello = Hello {
        oldest: VERSION,
        newest: WITH_PACKED_QUEUES,
    };

    /// Checks whether the successor understands this version. The error is for the user.
    pub fn check(&self, version: u32) -> Result<(), String> {
        let Hello { oldest, newest } = self;
        match (oldest..=newest).contains(&&version) {
            true => Ok(()),
            false => Err(format!(
                "the new program takes over by handover versions {oldest} to {newest}, and this \
                 server hands over by version {version}; restart the server instead"
            )),
        }
    }
}

/// The state of the server. Numbers of files are indexes of the list of files that comes with it:
/// first those of the server, then those of each disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    /// Version of the messages that the successor must understand to continue from this state.
    pub version: u32,
    /// Process ID of the predecessor.
    pub pid: u32,
    /// Number of the server's files.
    pub files: usize,
    /// The disks of the server's own process.
    pub disks: Vec<DiskState>,
    /// Owners of the disks' names.
    pub origins: BTreeMap<String, Definition>,
    /// Definitions of the disks. Older predecessors have none.
    #[serde(default)]
    pub definitions: Option<Definitions>,
    /// Listeners of NBD clients.
    pub nbd: Vec<ListenerState>,
    /// State of the API's sockets. `None`: the predecessor has no API.
    pub api: Option<ApiState>,
    /// Directory of persistent disks, with its lock.
    pub kept: Option<(PathBuf, usize)>,
    /// Time since the server was started, in milliseconds; not reset by upgrades. 0 if tenants have
    /// the disks.
    pub uptime_ms: u64,
    /// Tenants, whose processes have the disks: `disks` is empty then.
    #[serde(default)]
    pub tenants: Option<Vec<TenantState>>,
    /// Control groups of the tenants.
    #[serde(default)]
    pub groups: Vec<GroupsState>,
}

/// Control groups of tenants in one hierarchy.
#[derive(Debug, Serialize, Deserialize)]
pub struct GroupsState {
    /// Version of the kernel's control groups, 1 or 2.
    pub version: u8,
    /// Names of the controllers.
    pub controllers: Vec<String>,
    /// Directory of the server's group, which contains the tenants' groups.
    pub dir: PathBuf,
    /// Index of the file that locks the directory.
    pub lock: usize,
}

/// A tenant, whose process continues under the new supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub struct TenantState {
    /// Name of the tenant.
    pub name: String,
    /// User of its process.
    #[serde(default)]
    pub user: Option<User>,
    /// The process. Without one, the supervisor must start it.
    pub process: Option<ProcessState>,
    /// The tenant's disks.
    pub disks: Vec<TenantDisk>,
}

/// State of a tenant's process.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessState {
    /// Process ID.
    pub pid: u32,
    /// Version of the link that the process speaks.
    pub link_version: u32,
    /// Time since the process was started, in milliseconds.
    pub lives_ms: u64,
    /// Index of the file with the pidfd.
    pub pidfd: usize,
    /// Index of the file with the supervisor's end of the link.
    pub link: usize,
    /// Index of the file with the supervisor's end of the gate.
    pub gate: usize,
    /// Pipe of its standard error. None: its standard error is that of the supervisor.
    #[serde(default)]
    pub log: Option<usize>,
    /// The supervisor has received a request for a file, and has not replied.
    #[serde(default)]
    pub owes_answer: bool,
}

/// A disk of a tenant.
#[derive(Debug, Serialize, Deserialize)]
pub struct TenantDisk {
    /// Definition of the disk.
    pub table: DiskSpec,
    /// Listening socket for the disk's front-ends. `None`: the disk has no such socket.
    pub listener: Option<ListenerState>,
    /// The process serves the disk.
    pub is_there: bool,
    /// Paths at which files that its image names were found.
    pub found: Vec<PathBuf>,
    /// The disk's last known state, in JSON.
    pub shown: Value,
}

/// State of a disk that this process serves.
#[derive(Debug, Serialize, Deserialize)]
pub struct DiskState {
    /// Definition of the disk.
    pub table: DiskSpec,
    /// The export for a front-end, if the disk has one.
    pub export: Option<ExportState>,
    /// Number of the disk's files.
    pub files: usize,
    /// State that the parts of the disk begin with.
    #[serde(default)]
    pub lent: PartRecords,
    /// Files that the predecessor has open: the successor rejects other files that have the same
    /// names. Empty if the predecessor is older.
    #[serde(default)]
    pub used: Vec<UsedFile>,
}

/// All queues have stopped, NBD clients wait, and the disks are closed. The clients' files come
/// with the message.
#[derive(Debug, Serialize, Deserialize)]
pub struct Stopped {
    /// Positions of the queues of each disk.
    pub bases: Vec<Vec<u32>>,
    /// The stopped NBD clients.
    pub clients: Vec<ClientState>,
    /// Last state of the parts of each disk.
    #[serde(default)]
    pub left: Vec<PartRecords>,
}

/// Replies of the successor.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// The successor has checked the state, and can take over.
    Prepared,
    /// The successor has taken the disks into use, and waits for [`Go`].
    Active,
    /// The successor serves the disks, and its API listens.
    Serving,
    /// The successor cannot take over, for this reason: a message for the user, in one line.
    Refused(String),
}

/// Everything belongs to the successor.
#[derive(Debug, Serialize, Deserialize)]
pub struct Go;

/// Messages of a successor with tenants after `Serving`: each tenant gets a new process, too.
#[derive(Debug, Serialize, Deserialize)]
pub enum Progress {
    /// Result for one tenant: its process was replaced, or continues because that failed.
    Tenant(Renewal),
    /// No more tenants follow.
    Done,
}

/// Result of the replacement of a tenant's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Renewal {
    /// Name of the tenant.
    pub tenant: String,
    /// The process that has the tenant's disks.
    pub pid: Option<u32>,
    /// Time for which queues were stopped, in milliseconds, or why the tenant keeps its old
    /// process.
    pub outcome: Result<f64, String>,
}

/// The counters of each disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct Counted(pub Vec<DiskCounts>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_do_not_meet_are_refused() {
        for version in VERSION..=WITH_PACKED_QUEUES {
            assert!(Hello::OURS.check(version).is_ok());
            for (oldest, newest, meets) in [
                (0, version - 1, false),
                (0, version + 3, true),
                (version + 1, version + 2, false),
                (1, 1, version == 1),
            ] {
                let checked = Hello { oldest, newest }.check(version);
                assert_eq!(checked.is_ok(), meets, "{checked:?}");
            }
        }
    }

    /// A server of version 1 sends nothing about parts, and a successor of version 1 ignores what a
    /// newer server sends.
    #[test]
    fn parts_that_are_not_spoken_of_have_left_nothing() {
        let stopped: Stopped = serde_json::from_str(r#"{"bases":[[1]],"clients":[]}"#).unwrap();
        assert!(stopped.left.is_empty());
        let said = serde_json::to_value(Stopped {
            bases: Vec::new(),
            clients: Vec::new(),
            left: vec![PartRecords::new()],
        });
        let said = said.unwrap();
        assert_eq!(
            (&said["bases"], &said["clients"]),
            (&serde_json::json!([]), &serde_json::json!([]))
        );
    }

    /// A newer server of the same version may say more.
    #[test]
    fn what_is_not_known_is_passed_over() {
        let text = r#"{"version":1,"pid":3,"files":0,"disks":[],"origins":{},"nbd":[],"api":null,"kept":null,
                       "uptime_ms":5,"weather":"fine"}"#;
        let state: State = serde_json::from_str(text).unwrap();
        assert_eq!(state.uptime_ms, 5);
        assert!(state.tenants.is_none());
        let hello: Hello = serde_json::from_str(r#"{"oldest":1,"newest":9,"x":[]}"#).unwrap();
        assert!(hello.check(VERSION).is_ok());
        assert!(serde_json::from_str::<State>(r#"{"version":1}"#).is_err());
    }
}
