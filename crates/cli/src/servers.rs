//! Finds the servers on this host, and the one that a user names.

use anyhow::{Context, anyhow, bail};
use fathom_client::{Client, ClientError, place};
use fathom_control::Owner;
use fathom_metrics::Info;
use fathom_spec::DiskSpec;
use fathom_units::did_you_mean;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// A disk, as the API describes it.
#[derive(Deserialize)]
pub struct Shown {
    state: Info,
    /// Owner of the definition; absent from older servers.
    #[serde(default)]
    owner: Option<Owner>,
    #[serde(default)]
    options: Value,
    /// Definition of the disk; absent from older servers.
    #[serde(default)]
    definition: Value,
}

impl Shown {
    pub fn info(self) -> Info {
        Info {
            owner: self.owner,
            changed: self.changed(),
            ..self.state
        }
    }

    /// Returns the options in which the disk differs from its definition.
    ///
    /// The list is empty if a newer server has options that this program does not know.
    fn changed(&self) -> Vec<String> {
        let definition = DiskSpec::deserialize(&self.definition);
        let options = DiskSpec::deserialize(&self.options);
        let both = definition.ok().zip(options.ok());
        both.map_or_else(Vec::new, |(definition, options)| {
            definition.differences(&options)
        })
    }
}

/// Tells the user that a change is temporary, if the disk is static.
pub fn note_owner(disk: &str, owner: Option<Owner>) {
    if owner == Some(Owner::Static) {
        eprintln!(
            "fathom: disk '{disk}' is defined in the server's configuration or on its command line: this change \
             lasts until the server restarts"
        );
    }
}

/// Calls [`note_owner`] with the owner in a server's reply.
pub fn note_reply(disk: &str, reply: &Value) {
    note_owner(disk, Owner::deserialize(&reply["owner"]).ok());
}

/// A host that has not responded, and why.
#[derive(Debug, Serialize)]
pub struct Failed {
    pub host: String,
    pub problem: String,
}

/// All disks of a server, as the API lists them.
#[derive(Deserialize)]
pub struct Disks {
    disks: Vec<Shown>,
    /// Disks that are defined, but not served; absent from older servers.
    #[serde(default)]
    pub failed: Vec<FailedDisk>,
}

/// A disk that is defined, but not served.
#[derive(Deserialize)]
pub struct FailedDisk {
    pub name: String,
    pub problem: String,
}

impl Disks {
    pub fn infos(self) -> Vec<Info> {
        self.disks.into_iter().map(Shown::info).collect()
    }
}

/// Returns the disks that a server serves.
pub fn disks(server: &Client) -> Result<Vec<Info>, ClientError> {
    all_disks(server).map(Disks::infos)
}

/// Returns all disks of a server, also those that are defined but not served.
pub fn all_disks(server: &Client) -> Result<Disks, ClientError> {
    server.get(&["v1", "disks"]).send()
}

/// Connects to all servers of this user; yields each one with its process id.
pub fn running() -> impl Iterator<Item = (u32, Client)> {
    let all = place::all().into_iter();
    all.filter_map(|(pid, path)| Some((pid, Client::connect(&path).ok()?)))
}

/// The directory of root's servers, which all users can list.
const OF_ROOT: &str = "/run/fathom/control";

/// Tells the user which servers a list does not contain. `is_empty`: the list has no server.
pub fn note_not_shown(is_empty: bool) {
    if let Some(note) = not_shown(is_empty) {
        eprintln!("fathom: {note}");
    }
}

fn not_shown(is_empty: bool) -> Option<&'static str> {
    if geteuid().is_root() {
        let note = "no server of root is running; servers of other users are not shown (list them as \
                    that user)";
        return is_empty.then_some(note);
    }
    if fathom_sockets::runtime_dir().is_none() {
        return Some(
            "XDG_RUNTIME_DIR is not set, so servers of this user cannot be listed; use `sudo fathom list` \
             for servers of root",
        );
    }
    match (is_empty, is_served_by_root()) {
        (true, _) => Some(
            "no server of this user is running; servers of other users are not shown (use `sudo fathom \
             list` for those of root)",
        ),
        (false, true) => {
            Some("servers of other users are not shown (use `sudo fathom list` for those of root)")
        }
        (false, false) => None,
    }
}

/// Whether a server of root runs. A killed server may have left its socket, so this checks /proc.
fn is_served_by_root() -> bool {
    let entries = fs::read_dir(OF_ROOT).into_iter().flatten().flatten();
    let mut pids = entries.filter_map(|entry| place::pid_of(&entry.path()));
    pids.any(|pid| Path::new("/proc").join(pid.to_string()).exists())
}

/// Finds a server, and the disk if `text` names one.
///
/// `text` is a process id, the path of a server's socket, or the name of a disk. A disk name takes
/// precedence over a socket of that name in this directory, which may be the disk's own socket.
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
        0 => Err(anyhow!(unknown(text))),
        _ => bail!(
            "several servers have a disk '{text}'; name the server by its process id: {}",
            pids(&servers)
        ),
    }
}

/// Number of names that a message lists.
const LISTED: usize = 5;

/// Explains that `text` names neither a disk nor a server, and suggests others.
fn unknown(text: &str) -> String {
    let servers: Vec<_> = running().collect();
    if servers.is_empty() {
        return format!(
            "no disk or server '{text}': no server runs here; start one with 'fathom serve'"
        );
    }
    let names = servers.iter().filter_map(|(_, server)| disks(server).ok());
    let names: BTreeSet<String> = names.flatten().map(|disk| disk.name).collect();
    let hint = did_you_mean(text, names.iter().map(String::as_str));
    let few = |all: Vec<String>| match all.len() {
        0 => "none".to_owned(),
        1..=LISTED => all.join(", "),
        more => format!("{} and {} others", all[..LISTED].join(", "), more - LISTED),
    };
    let pids = servers.iter().map(|(pid, _)| pid.to_string()).collect();
    let names = names.into_iter().collect();
    let separator = if hint.is_empty() { ";" } else { "" };
    format!(
        "no disk or server '{text}'{hint}{separator} disks are {}; servers are {} ('fathom list' shows all)",
        few(names),
        few(pids)
    )
}

fn is_socket(path: &str) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Returns the server `named`, or the only server on this host.
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
            "no server is running; start one with `fathom serve --config FILE`, or name one with --server"
        ),
        _ => bail!(
            "several servers are running; name one with --server: {}",
            pids(&servers)
        ),
    }
}

fn pids(servers: &[(u32, Client)]) -> String {
    let pids: Vec<_> = servers.iter().map(|(pid, _)| pid.to_string()).collect();
    pids.join(", ")
}

/// Returns an absolute path, because the server may have another working directory.
///
/// # Errors
///
/// Fails with a message for the user if the path is not UTF-8.
pub fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => bail!("{}: the path is not valid UTF-8", path.display()),
    }
}
