//! The servers of this machine, and which of them is meant.

use anyhow::{Context, anyhow, bail};
use fathom_daemon::control::{Client, ClientError, Info, Request, all, default_path};
use serde::Deserialize;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// A running server.
pub struct Server {
    pub pid: u32,
    path: PathBuf,
    /// The names of its disks.
    pub disks: Vec<String>,
}

#[derive(Deserialize)]
struct Names {
    disks: Vec<String>,
}

impl Server {
    /// `None`: it is gone.
    fn ask((pid, path): (u32, PathBuf)) -> Option<Server> {
        let Names { disks } = Client::connect(&path).ok()?.ask(&Request::Disks).ok()?;
        Some(Server { pid, path, disks })
    }

    /// What it says of each of its disks; those that go meanwhile are left out.
    pub fn infos(&self) -> Result<Vec<Info>, ClientError> {
        let mut client = Client::connect(&self.path)?;
        let mut infos = Vec::new();
        for disk in &self.disks {
            match client.ask_about(Some(disk), &Request::Info) {
                Err(ClientError::Refused(_)) => {}
                info => infos.push(info?),
            }
        }
        Ok(infos)
    }
}

/// This user's, except those whose control socket is somewhere else.
pub fn running() -> Vec<Server> {
    all().into_iter().filter_map(Server::ask).collect()
}

/// The control socket of the server that is meant, and the disk, if that was named: `text` is a
/// process id, the path of a control socket, or a disk's name.
pub fn find(text: &str) -> anyhow::Result<(PathBuf, Option<String>)> {
    if let Ok(pid) = text.parse() {
        let path = default_path(pid);
        let path = path.context("XDG_RUNTIME_DIR is not set; give the path of the control socket");
        return Ok((path?, None));
    }
    let is_socket = |found: fs::Metadata| found.file_type().is_socket();
    if fs::metadata(text).is_ok_and(is_socket) {
        return Ok((text.into(), None));
    }
    let has_it = |server: &Server| server.disks.iter().any(|disk| disk == text);
    let servers: Vec<_> = running().into_iter().filter(has_it).collect();
    match &servers[..] {
        [one] => Ok((one.path.clone(), Some(text.to_owned()))),
        [] if text.contains('/') => Err(ClientError::NotRunning(text.into()).into()),
        [] => Err(anyhow!(
            "'{text}' is neither a server's process id or control socket nor a disk that one serves \
             here (see `fathom list`)"
        )),
        several => {
            let pids: Vec<_> = several.iter().map(|one| one.pid.to_string()).collect();
            let pids = pids.join(", ");
            bail!("several servers have a disk '{text}': say which, by process id: {pids}")
        }
    }
}

/// The control socket of the only server that there is.
pub fn only() -> anyhow::Result<PathBuf> {
    match &running()[..] {
        [one] => Ok(one.path.clone()),
        [] => bail!(
            "no server runs here: start one (`fathom serve --config FILE`), or name it by --server"
        ),
        several => {
            let pids: Vec<_> = several.iter().map(|one| one.pid.to_string()).collect();
            bail!(
                "several servers run here: name one by --server: {}",
                pids.join(", ")
            )
        }
    }
}

/// A path as a server sees it, which may have another working directory. The error is for the user.
pub fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => bail!("{}: the path is not valid UTF-8", path.display()),
    }
}
