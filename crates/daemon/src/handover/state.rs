//! What a server and its successor say to each other.
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
//! Up to `Stopped` all is the old one's, and it goes on if anything fails. From then on it does so
//! only when the successor is dead, which the successor cannot outlive: `Go`, or that the old one is
//! gone, says that it will not.

use super::left::LeftState;
use crate::users::User;
use fathom_control::{Definition, Definitions};
use fathom_exports::ListenerState;
use fathom_exports::nbd::ClientState;
use fathom_exports::vhost_user::ExportState;
use fathom_files::UsedFile;
use fathom_metrics::DiskCounts;
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Of what is below. It changes when a successor that does not know of the change would do
/// something else than go on.
pub const VERSION: u32 = 1;

/// That of a server with a disk that lends something: `DiskState::lent`, `Stopped::left`.
pub const WITH_PARTS: u32 = 2;

/// The version of a server one of whose front-ends is in the middle of a message: an older successor
/// would lose the part of it that has arrived.
pub const WITH_UNFINISHED_MESSAGES: u32 = 3;

/// The first word, the successor's.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    pub oldest: u32,
    pub newest: u32,
}

impl Hello {
    /// Of this program.
    pub const OURS: Hello = Hello {
        oldest: VERSION,
        newest: WITH_UNFINISHED_MESSAGES,
    };

    /// Whether it understands what is said in this version. The error is for the user.
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

/// Numbers of files are those of a list beside it: first the server's own, then those of each disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    pub pid: u32,
    /// How many files are the server's.
    pub files: usize,
    pub disks: Vec<DiskState>,
    /// Why they are there.
    pub origins: BTreeMap<String, Definition>,
    /// Their definitions; an older predecessor has none.
    #[serde(default)]
    pub definitions: Option<Definitions>,
    /// Where NBD clients connect.
    pub nbd: Vec<ListenerState>,
    pub api: Option<ApiState>,
    /// The directory of the disks that are kept, with its lock.
    pub kept: Option<(PathBuf, usize)>,
    pub uptime_ms: u64,
    /// Who has the disks, where each tenant has a process of its own: `disks` is empty then.
    #[serde(default)]
    pub tenants: Option<Vec<TenantState>>,
    /// Where the kernel accounts for what these use.
    #[serde(default)]
    pub groups: Vec<GroupsState>,
}

/// What serves the API.
#[derive(Debug, Serialize, Deserialize)]
pub struct ApiState {
    #[serde(flatten)]
    pub door: DoorState,
    /// By which metrics are told; without it, as is measured.
    #[serde(default)]
    pub ticks_per_second: Option<f64>,
}

/// Where its clients connect.
#[derive(Debug, Serialize, Deserialize)]
pub struct DoorState {
    #[serde(flatten)]
    pub listener: ListenerState,
    /// By TCP.
    #[serde(default)]
    pub web: Option<usize>,
    /// By TLS.
    #[serde(default)]
    pub remote: Option<usize>,
}

/// Control groups of tenants in one hierarchy.
#[derive(Debug, Serialize, Deserialize)]
pub struct GroupsState {
    /// The kernel's, 1 or 2.
    pub version: u8,
    /// By their names for the kernel.
    pub controllers: Vec<String>,
    /// The server's, which has those of tenants in it, and the file by which it is locked.
    pub dir: PathBuf,
    pub lock: usize,
}

/// A tenant, which goes on whoever its supervisor is.
#[derive(Debug, Serialize, Deserialize)]
pub struct TenantState {
    pub name: String,
    /// Who its process is.
    #[serde(default)]
    pub user: Option<User>,
    /// None: it is to be started.
    pub process: Option<ProcessState>,
    pub disks: Vec<TenantDisk>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessState {
    pub pid: u32,
    /// Its version of what a supervisor and a tenant tell each other.
    pub link_version: u32,
    pub lives_ms: u64,
    /// Files: it, and the two sockets by which it is spoken to.
    pub pidfd: usize,
    pub link: usize,
    pub gate: usize,
    /// What it says on its standard error; None: it has this process's.
    #[serde(default)]
    pub log: Option<usize>,
    /// The supervisor has taken a request for a file in, and has not answered it.
    #[serde(default)]
    pub owes_answer: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct TenantDisk {
    pub table: DiskSpec,
    pub listener: Option<ListenerState>,
    /// The process has it.
    pub is_there: bool,
    /// Where files were found that its image names.
    pub found: Vec<PathBuf>,
    /// How it was last shown.
    pub shown: Value,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct DiskState {
    pub table: DiskSpec,
    /// None: no front-ends.
    pub export: Option<ExportState>,
    /// How many files are its.
    pub files: usize,
    /// What its parts are to be made with.
    #[serde(default)]
    pub lent: LeftState,
    /// The files that the predecessor has open: the successor refuses others that are found by their names. Empty
    /// if the predecessor does not say.
    #[serde(default)]
    pub used: Vec<UsedFile>,
}

/// All queues have stopped, NBD clients wait, and the disks are closed. With the clients' files.
#[derive(Debug, Serialize, Deserialize)]
pub struct Stopped {
    /// Where the queues of each disk are.
    pub bases: Vec<Vec<u16>>,
    pub clients: Vec<ClientState>,
    /// How the parts of each disk were then.
    #[serde(default)]
    pub left: Vec<LeftState>,
}

/// What the successor has to say of it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    Prepared,
    Active,
    /// It serves, and can be found.
    Serving,
    /// One line for the user.
    Refused(String),
}

/// It is the successor's.
#[derive(Debug, Serialize, Deserialize)]
pub struct Go;

/// What a successor with tenants says after `Serving`: each gets another process, too.
#[derive(Debug, Serialize, Deserialize)]
pub enum Progress {
    Tenant(Renewal),
    /// That were all.
    Done,
}

/// What has become of a tenant's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Renewal {
    pub tenant: String,
    /// Who has its disks now.
    pub pid: Option<u32>,
    /// For so long its queues stood still, in milliseconds; or why it is the same process as before.
    pub outcome: Result<f64, String>,
}

/// What was counted, by disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct Counted(pub Vec<DiskCounts>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_do_not_meet_are_refused() {
        for version in [VERSION, WITH_PARTS, WITH_UNFINISHED_MESSAGES] {
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

    /// A server of version 1 says nothing of parts, and a successor of version 1 passes over what is said.
    #[test]
    fn parts_that_are_not_spoken_of_have_left_nothing() {
        let stopped: Stopped = serde_json::from_str(r#"{"bases":[[1]],"clients":[]}"#).unwrap();
        assert!(stopped.left.is_empty());
        let said = serde_json::to_value(Stopped {
            bases: Vec::new(),
            clients: Vec::new(),
            left: vec![LeftState::new()],
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
