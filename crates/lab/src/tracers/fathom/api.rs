//! Asking a server about its disk.

use std::path::{Path, PathBuf};

use fathom_client::{Client, ClientError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// What a server says of its disk, as far as tracers care.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Info {
    pub pid: u32,
    /// The disk's name.
    pub name: String,
    /// The image's path, `memory` or `null`.
    pub disk: String,
    pub version: String,
    /// `io_uring`, `native` or `threads`.
    pub engine: String,
    /// `none`, `writeback`, ...; None for disks without files.
    pub cache: Option<String>,
    /// The file that it traces to.
    pub trace: Option<PathBuf>,
    workers: Vec<Worker>,
    filters: Vec<Filter>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct Worker {
    #[serde(default)]
    polled_ns: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct Filter {
    name: String,
}

impl Info {
    /// Ns for which all workers together have looked for work instead of sleeping, so far.
    pub fn polled_ns(&self) -> u64 {
        self.workers.iter().map(|worker| worker.polled_ns).sum()
    }

    /// The names of the disk's filters, in the order in which requests meet them.
    pub fn filters(&self) -> Vec<String> {
        let names = self.filters.iter().map(|filter| filter.name.clone());
        names.collect()
    }
}

/// A disk, at its server.
#[derive(Debug)]
pub struct Api {
    client: Client,
    disk: String,
}

#[derive(Deserialize)]
struct Shown {
    state: Info,
}

#[derive(Deserialize)]
struct Disks {
    disks: Vec<Shown>,
}

impl Api {
    pub fn new(client: Client, disk: String) -> Api {
        Api { client, disk }
    }

    /// Connects to the socket of a server that has one disk.
    ///
    /// # Errors
    /// When nobody listens there, or it is unknown which of several disks is meant.
    pub fn connect(path: &Path) -> Result<Api> {
        let client = Client::connect(path).map_err(said)?;
        let Disks { mut disks } = client.get(&["v1", "disks"]).send().map_err(said)?;
        match disks.len() {
            1 => {
                let disk = disks.remove(0).state.name;
                Ok(Api { client, disk })
            }
            n => Err(Error::Protocol(format!(
                "{}: it serves {n} disks; one is needed",
                path.display()
            ))),
        }
    }

    /// What is running.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn info(&self) -> Result<Info> {
        let shown: Shown = self.client.get(&self.place()[..3]).send().map_err(said)?;
        Ok(shown.state)
    }

    /// Its times by operation and stage, as `fathom stats --json` prints them.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn stats(&self) -> Result<Value> {
        let place = ["v1", "disks", &self.disk, "stats"];
        self.client.get(&place).send().map_err(said)
    }

    /// Switches tracing on, to a new file, or off.
    ///
    /// # Errors
    /// When the server cannot write the file.
    pub fn trace(&self, file: Option<&Path>) -> Result<()> {
        match file {
            Some(file) => {
                let started = self
                    .client
                    .put(&self.place())
                    .json(&json!({ "file": file }));
                started.send::<Value>().map(drop)
            }
            None => self.client.delete(&self.place()).send(),
        }
        .map_err(said)
    }

    /// Of its trace, below itself.
    fn place(&self) -> [&str; 4] {
        ["v1", "disks", &self.disk, "trace"]
    }
}

fn said(error: ClientError) -> Error {
    Error::Protocol(format!("fathom serve: {error}"))
}
