//! What is said on the control socket: one JSON object a line, each answered
//! by one line. An answer with a member `error` says why there is no other.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

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
    /// End like on SIGTERM: `{"quitting": true}`.
    Quit,
}

/// A daemon and its disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Info {
    pub version: String,
    pub pid: u32,
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
    /// Where front-ends connect.
    pub vhost_user: String,
    /// Who is connected.
    pub front_end: Option<FrontEnd>,
    /// The most virtqueues that a front-end may use.
    pub max_queues: u16,
    pub queues_running: usize,
    pub workers: Vec<WorkerInfo>,
    /// The file being traced to.
    pub trace: Option<PathBuf>,
    pub uptime_seconds: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrontEnd {
    /// Its process; 0 when it is in a PID namespace that is not visible.
    pub pid: i32,
}

/// Counted since the daemon started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Requests that were answered.
    pub requests: u64,
    /// Interrupts sent.
    pub notifications: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Request, String> {
        serde_json::from_str(line).map_err(|error| error.to_string())
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
            Request::Quit,
        ] {
            let line = serde_json::to_string(&request).unwrap();
            assert_eq!(parse(&line), Ok(request));
        }
    }
}
