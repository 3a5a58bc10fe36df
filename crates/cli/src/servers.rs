//! The servers of this machine, and which of them is meant.

use anyhow::{Context, anyhow, bail};
use fathom_client::{Client, ClientError, place};
use fathom_daemon::{Info, Owner};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// A disk, as a server shows it.
#[derive(Deserialize)]
pub struct Shown {
    state: Info,
    /// An older server does not say.
    #[serde(default)]
    owner: Option<Owner>,
}

impl Shown {
    pub fn info(self) -> Info {
        Info {
            owner: self.owner,
            ..self.state
        }
    }
}

/// Tells the user how long a change of this disk lasts, if it is not kept.
pub fn note_owner(disk: &str, owner: Option<Owner>) {
    if owner == Some(Owner::Static) {
        eprintln!(
            "fathom: disk '{disk}' is defined in the server's configuration or on its command line: this change \
             lasts until the server restarts"
        );
    }
}

/// Likewise, by a server's reply to a change.
pub fn note_reply(disk: &str, reply: &Value) {
    note_owner(disk, Owner::deserialize(&reply["owner"]).ok());
}

/// A host that has not told anything, and why.
#[derive(Debug, Serialize)]
pub struct Failed {
    pub host: String,
    pub problem: String,
}

/// All of a server's, as it lists them.
#[derive(Deserialize)]
pub struct Disks {
    disks: Vec<Shown>,
}

impl Disks {
    pub fn infos(self) -> Vec<Info> {
        self.disks.into_iter().map(Shown::info).collect()
    }
}

/// The disks of a server.
pub fn disks(server: &Client) -> Result<Vec<Info>, ClientError> {
    server.get(&["v1", "disks"]).send().map(Disks::infos)
}

/// Those of this user that can be asked, by process id.
pub fn running() -> impl Iterator<Item = (u32, Client)> {
    let all = place::all().into_iter();
    all.filter_map(|(pid, path)| Some((pid, Client::connect(&path).ok()?)))
}

/// The server that is meant, and the disk, if that was named: `text` is a
/// process id, the path of a server's socket, or a disk's name. A name comes before the socket of that
/// name in this directory, which may be the disk's own.
pub fn find(text: &str) -> anyhow::Result<(Client, Option<String>)> {
    if let Ok(pid) = text.parse() {
        let path = place::entry_of(pid);
        let path: PathBuf =
            path.context("XDG_RUNTIME_DIR is not set; give the path of the socket")?;
        return Ok((Client::connect(&path)?, None));
    }
    if text.contains('/') && is_socket(text) {
        return Ok((Client::connect(Path::new(text))?, None));
    }
    let has_it = |(_, server): &(u32, Client)| {
        let disk: Result<Shown, _> = server.get(&["v1", "disks", text]).send();
        disk.is_ok()
    };
    let mut servers: Vec<_> = running().filter(has_it).collect();
    match servers.len() {
        1 => Ok((servers.remove(0).1, Some(text.to_owned()))),
        0 if is_socket(text) => Ok((Client::connect(Path::new(text))?, None)),
        0 if text.contains('/') => Err(ClientError::NotRunning(text.into()).into()),
        0 => Err(anyhow!(
            "'{text}' is neither a server's process id or socket nor a disk that one serves \
             here (see `fathom list`)"
        )),
        _ => bail!(
            "several servers have a disk '{text}': say which, by process id: {}",
            pids(&servers)
        ),
    }
}

fn is_socket(path: &str) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// The server that is `named`, or the only one that there is.
pub fn named_or_only(named: Option<&str>) -> anyhow::Result<Client> {
    match named {
        Some(server) => Ok(find(server)?.0),
        None => only(),
    }
}

fn only() -> anyhow::Result<Client> {
    let mut servers: Vec<_> = running().collect();
    match servers.len() {
        1 => Ok(servers.remove(0).1),
        0 => bail!(
            "no server runs here: start one (`fathom serve --config FILE`), or name it by --server"
        ),
        _ => bail!(
            "several servers run here: name one by --server: {}",
            pids(&servers)
        ),
    }
}

fn pids(servers: &[(u32, Client)]) -> String {
    let pids: Vec<_> = servers.iter().map(|(pid, _)| pid.to_string()).collect();
    pids.join(", ")
}

/// A path as a server sees it, which may have another working directory. The error is for the user.
pub fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => bail!("{}: the path is not valid UTF-8", path.display()),
    }
}
