//! Queries a server about its disk.

use std::path::{Path, PathBuf};

use fathom_client::{Client, ClientError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A server's description of its disk, limited to the fields that tracers need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Info {
    /// Process id of the server.
    pub pid: u32,
    /// The disk's name.
    pub name: String,
    /// Path of the image, or `memory` or `null`.
    pub disk: String,
    /// Path of the vhost-user socket, if the disk has one.
    pub vhost_user: Option<PathBuf>,
    /// Format of the image: `raw`, `qcow2`, ...
    pub format: String,
    /// Start of the disk in a raw image, in bytes, as the disk's options have it.
    #[serde(skip)]
    offset: u64,
    /// Version of the server.
    pub version: String,
    /// `io_uring`, `native` or `threads`.
    pub engine: String,
    /// `none`, `writeback`, ...; `None` for disks without files.
    pub cache: Option<String>,
    /// Number of virtqueues that are running.
    #[serde(default)]
    pub queues_running: usize,
    /// File to which the server traces the disk.
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
    /// Returns the total time in nanoseconds that all workers have polled for work so far.
    pub fn polled_ns(&self) -> u64 {
        self.workers.iter().map(|worker| worker.polled_ns).sum()
    }

    /// Returns the names of the disk's filters in the order in which requests pass them.
    pub fn filters(&self) -> Vec<String> {
        let names = self.filters.iter().map(|filter| filter.name.clone());
        names.collect()
    }

    /// Returns whether each byte of the disk is the byte of the image at the same offset.
    pub fn is_flat(&self) -> bool {
        // This filter writes to an overlay.
        let has_overlay = self.filters.iter().any(|filter| filter.name == "cow");
        self.format == "raw" && self.offset == 0 && !has_overlay
    }
}

/// A disk on a server.
#[derive(Debug)]
pub struct Api {
    client: Client,
    disk: String,
}

#[derive(Deserialize)]
struct Shown {
    state: Info,
    #[serde(default)]
    options: DiskOptions,
}

/// The options of a disk, limited to those that tracers need.
#[derive(Default, Deserialize)]
struct DiskOptions {
    #[serde(default)]
    offset: u64,
}

impl Shown {
    fn info(self) -> Info {
        Info {
            offset: self.options.offset,
            ..self.state
        }
    }
}

#[derive(Deserialize)]
struct Disks {
    disks: Vec<Shown>,
}

impl Api {
    /// Creates the API of the disk with this name from a connection to its server.
    pub fn new(client: Client, disk: String) -> Api {
        Api { client, disk }
    }

    /// Connects to the socket of a server that serves exactly one disk.
    ///
    /// # Errors
    /// When no server accepts the connection, or the server has several disks or none.
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

    /// Connects to a server's API, and selects the disk with this vhost-user socket.
    ///
    /// # Errors
    /// When no server accepts the connection, or the server has no disk with this socket.
    pub fn connect_to_disk(path: &Path, vhost_user: &Path) -> Result<Api> {
        let client = Client::connect(path).map_err(said)?;
        let Disks { disks } = client.get(&["v1", "disks"]).send().map_err(said)?;
        let wanted = vhost_user.canonicalize().ok();
        let mut found = disks.into_iter().map(|shown| shown.state).filter(|info| {
            let socket = info.vhost_user.as_ref();
            socket.and_then(|path| path.canonicalize().ok()) == wanted && wanted.is_some()
        });
        match found.next() {
            Some(info) => Ok(Api {
                client,
                disk: info.name,
            }),
            None => Err(Error::Protocol(format!(
                "{}: no disk of this server has the socket {}",
                path.display(),
                vhost_user.display()
            ))),
        }
    }

    /// Returns the description of the disk.
    ///
    /// # Errors
    /// When the server does not respond.
    pub fn info(&self) -> Result<Info> {
        let shown: Shown = self.client.get(&self.place()[..3]).send().map_err(said)?;
        Ok(shown.info())
    }

    /// Returns the disk's times by operation and stage, as `fathom stats --json` prints them.
    ///
    /// # Errors
    /// When the server does not respond.
    pub fn stats(&self) -> Result<Value> {
        let place = ["v1", "disks", &self.disk, "stats"];
        self.client.get(&place).send().map_err(said)
    }

    /// Switches tracing to a new file, or off.
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

    /// Returns the API path of the disk's trace.
    fn place(&self) -> [&str; 4] {
        ["v1", "disks", &self.disk, "trace"]
    }
}

fn said(error: ClientError) -> Error {
    Error::Protocol(format!("fathom serve: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_raw_image_from_its_start_is_flat() {
        let filtered = |format: &str, options: Value, filter: &str| {
            let state = json!({"pid": 1, "name": "a", "disk": "/a", "format": format, "version": "1",
                "engine": "threads", "cache": null, "trace": null, "workers": [],
                "filters": [{"name": filter}]});
            let shown = json!({"state": state, "options": options});
            serde_json::from_value::<Shown>(shown).unwrap().info()
        };
        let shown = |format, options| filtered(format, options, "delay");
        assert!(shown("raw", json!({})).is_flat());
        assert!(!filtered("raw", json!({}), "cow").is_flat());
        assert!(!shown("raw", json!({"offset": 1_048_576})).is_flat());
        assert!(!shown("qcow2", json!({})).is_flat());
    }
}
