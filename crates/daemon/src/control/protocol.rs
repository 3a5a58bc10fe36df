//! What is said on the control socket: one JSON object a line, each answered
//! by one line. An answer with a member `error` says why there is no other.

use crate::table::DiskTable;
use fathom_stack::FilterInfo;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use utoipa::ToSchema;

/// A request, and the disk that it is about: `{"command": "stats", "disk":
/// "NAME"}`. The disk may be left out where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub disk: Option<String>,
    pub request: Request,
}

impl Ask {
    /// The error is a text for the client.
    pub fn parse(line: &[u8]) -> Result<Ask, String> {
        let mut members: Map<String, Value> =
            serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let disk = match members.remove("disk") {
            None => None,
            Some(Value::String(name)) => Some(name),
            Some(_) => return Err("a disk's name is a string".into()),
        };
        let request = Request::deserialize(Value::Object(members));
        let request = request.map_err(|error| error.to_string())?;
        Ok(Ask { disk, request })
    }

    /// The inverse. The error: what cannot be said in JSON.
    pub fn to_line(&self) -> Result<String, serde_json::Error> {
        let mut line = serde_json::to_value(&self.request)?;
        if let (Some(disk), Value::Object(members)) = (&self.disk, &mut line) {
            members.insert("disk".into(), disk.as_str().into());
        }
        Ok(line.to_string())
    }
}

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Where requests spent their time: answered by a
    /// [`Summary`](fathom_trace::Summary).
    Stats,
    /// What is running: answered by an [`Info`].
    Info,
    /// Trace to a file from now on, or (null) stop it: `{"trace": file}`.
    Trace {
        // With a deserializer of its own a field must be there, null or not.
        #[serde(deserialize_with = "Option::deserialize")]
        file: Option<PathBuf>,
    },
    /// Read the image's size again: `{"size": bytes}`.
    Resize,
    /// Change options of one of the disk's filters: all of them, or none.
    /// `filter` is its name, with `#2` for the second one of that name; an
    /// empty value is the option's default. Answered by a [`FilterInfo`] once
    /// all workers go by it.
    Set {
        filter: String,
        options: BTreeMap<String, String>,
    },
    /// The disks' names: `{"disks": [name, ...]}`.
    Disks,
    /// All disks, each like `show`: `{"disks": [disk, ...]}`.
    List,
    /// A disk: `{"options": what it was added by, "state": an [`Info`]}`.
    Show,
    /// Serve one more disk: answered like `info` once it is.
    Add { options: Box<DiskTable> },
    /// Serve the disk no more: answered by its last statistics, when nothing
    /// of it is in flight. Who uses it keeps it, unless `force` disconnects
    /// them.
    Remove {
        #[serde(default)]
        force: bool,
    },
    /// End like on SIGTERM: `{"quitting": true}`.
    Quit,
}

/// A disk and its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Info {
    pub version: String,
    pub pid: u32,
    /// What the disk is asked for by.
    pub name: String,
    /// Where its bytes are.
    pub disk: String,
    pub format: String,
    /// Bytes.
    pub size: u64,
    /// Bytes.
    pub block_size: u32,
    pub read_only: bool,
    pub engine: String,
    /// None for disks that have no files.
    pub cache: Option<String>,
    /// Requests whose data was copied because O_DIRECT could not take it as
    /// it lay in memory or on the disk; None for disks that have no files.
    pub bounced: Option<u64>,
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
    pub uptime_seconds: u64,
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
        let users: Vec<_> = front_end.into_iter().chain(clients).collect();
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Request, String> {
        let ask = Ask::parse(line.as_bytes())?;
        assert_eq!(ask.disk, None);
        Ok(ask.request)
    }

    #[test]
    fn requests_are_objects_with_a_command() {
        assert_eq!(parse(r#"{"command":"stats"}"#), Ok(Request::Stats));
        let on = Request::Trace {
            file: Some("/x".into()),
        };
        assert_eq!(parse(r#"{"command":"trace","file":"/x"}"#), Ok(on));
        let off = Request::Trace { file: None };
        assert_eq!(parse(r#"{"command":"trace","file":null}"#), Ok(off));
    }

    #[test]
    fn what_is_misspelt_is_refused() {
        for bad in [
            "",
            "stats",
            "[]",
            "{}",
            r#"{"command":"halt"}"#,
            r#"{"command":"trace"}"#,
            r#"{"command":"trace","fiel":"/x"}"#,
            r#"{"command":"trace","file":7}"#,
            r#"{"command":"stats","disk":7}"#,
            r#"{"command":"stats","disk":null}"#,
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn requests_survive_a_round_trip() {
        for request in [
            Request::Stats,
            Request::Info,
            Request::Trace { file: None },
            Request::Resize,
            Request::Disks,
            Request::Add {
                options: Box::new(DiskTable::new("a".into(), "null:1G".parse().unwrap())),
            },
            Request::Remove { force: true },
            Request::Set {
                filter: "delay#2".into(),
                options: [("read".into(), "1ms".into())].into(),
            },
            Request::Quit,
        ] {
            for disk in [None, Some("a".to_owned())] {
                let request = request.clone();
                let ask = Ask { disk, request };
                let line = ask.to_line().unwrap();
                assert_eq!(Ask::parse(line.as_bytes()), Ok(ask));
            }
        }
    }
}
