//! Asking a daemon: one JSON object a line, each answered by one line. An answer with a member
//! `error` says why there is no other.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::lines::LineStream;

const CONNECT: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(10);

/// What a daemon says of itself, as far as tracers care.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    pub pid: u32,
    /// The image's path, `memory` or `null`.
    pub disk: String,
    pub version: String,
    /// `io_uring`, `native` or `threads`.
    pub engine: String,
    /// `none`, `writeback`, ...; empty for disks without files.
    pub cache: String,
    /// The file that it traces to.
    pub trace: Option<PathBuf>,
}

/// A connection to a daemon's control socket.
#[derive(Debug)]
pub struct Control {
    lines: LineStream,
    path: PathBuf,
}

impl Control {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn connect(path: &Path) -> Result<Control> {
        Ok(Control {
            lines: LineStream::connect(path, CONNECT)?,
            path: path.to_owned(),
        })
    }

    /// What is running.
    ///
    /// # Errors
    /// When it is no daemon of Fathom's.
    pub fn info(&mut self) -> Result<Info> {
        let answer = self.ask(&json!({"command": "info"}))?;
        let text = |name: &str| answer[name].as_str().unwrap_or_default().to_owned();
        let pid = answer["pid"]
            .as_u64()
            .and_then(|pid| u32::try_from(pid).ok());
        Ok(Info {
            pid: pid.ok_or_else(|| self.strange())?,
            disk: text("disk"),
            version: text("version"),
            engine: text("engine"),
            cache: text("cache"),
            trace: answer["trace"].as_str().map(PathBuf::from),
        })
    }

    /// Its times by operation and stage, as `fathom stats --json` prints them.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn stats(&mut self) -> Result<Value> {
        self.ask(&json!({"command": "stats"}))
    }

    /// Ns for which all workers together have looked for work instead of sleeping, so far.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn polled_ns(&mut self) -> Result<u64> {
        let answer = self.ask(&json!({"command": "info"}))?;
        let workers = answer["workers"].as_array().into_iter().flatten();
        Ok(workers
            .filter_map(|worker| worker["polled_ns"].as_u64())
            .sum())
    }

    /// The names of the disk's filters, in the order in which requests meet them.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn filters(&mut self) -> Result<Vec<String>> {
        let answer = self.ask(&json!({"command": "info"}))?;
        let filters = answer["filters"].as_array().into_iter().flatten();
        let names = filters.filter_map(|filter| filter["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// Switches tracing on, to a new file, or off.
    ///
    /// # Errors
    /// When the daemon cannot write the file.
    pub fn trace(&mut self, file: Option<&Path>) -> Result<()> {
        let answer = self.ask(&json!({"command": "trace", "file": file}))?;
        match answer.get("trace") {
            Some(_) => Ok(()),
            None => Err(self.strange()),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        self.lines.send(&request.to_string())?;
        let Some(line) = self.lines.receive(Instant::now() + ANSWER)? else {
            let what = format!("{}: no answer from the daemon", self.path.display());
            return Err(Error::Protocol(what));
        };
        let answer: Value = serde_json::from_str(&line).map_err(|_| self.strange())?;
        match answer.get("error").and_then(Value::as_str) {
            Some(error) => Err(Error::Protocol(format!("fathom serve: {error}"))),
            None => Ok(answer),
        }
    }

    fn strange(&self) -> Error {
        let path = self.path.display();
        Error::Protocol(format!("{path}: not a control socket of fathom"))
    }
}
