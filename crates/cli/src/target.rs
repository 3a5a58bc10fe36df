//! The server and the disk that a command is about.

use crate::servers::{Shown, disks, find};
use anyhow::bail;
use clap::Args;
use fathom_client::Client;
use fathom_daemon::Info;

/// Arguments that select a server and a disk.
#[derive(Args, Debug)]
pub struct Target {
    /// Disk name, or the process id or API socket of a server (see `fathom list`)
    #[arg(value_name = "NAME|PID|SOCKET")]
    disk_or_server: String,

    /// Server of the disk: its process id or API socket [default: the server that has the disk]
    #[arg(long, value_name = "PID|SOCKET", conflicts_with = "disk")]
    server: Option<String>,

    /// Disk of the server, if NAME is a process id or socket
    #[arg(long, value_name = "NAME", hide = true)]
    disk: Option<String>,
}

/// A disk of a server.
pub struct Disk {
    pub server: Client,
    pub name: String,
}

impl Disk {
    /// `named`: by the user, who may not have where there is only one.
    pub fn new(server: Client, named: Option<String>) -> anyhow::Result<Disk> {
        if let Some(name) = named {
            return Ok(Disk { server, name });
        }
        let mut names: Vec<_> = disks(&server)?.into_iter().map(|disk| disk.name).collect();
        match names.len() {
            1 => {
                let name = names.remove(0);
                Ok(Disk { server, name })
            }
            0 => bail!("the server has no disk; add one with 'fathom disk add'"),
            _ => bail!(
                "the server has several disks; name one of {}",
                names.join(", ")
            ),
        }
    }

    /// Where it is in the API.
    pub fn place(&self) -> [&str; 3] {
        ["v1", "disks", &self.name]
    }

    /// Something below that.
    pub fn below<'a>(&'a self, what: &'a str) -> [&'a str; 4] {
        ["v1", "disks", &self.name, what]
    }

    pub fn info(&self) -> anyhow::Result<Info> {
        let shown: Shown = self.server.get(&self.place()).send()?;
        Ok(shown.info())
    }
}

impl Target {
    /// Returns the server, and the name of the disk if the arguments name one.
    fn find(&self) -> anyhow::Result<(Client, Option<String>)> {
        if let Some(server) = &self.server {
            return Ok((find(server)?.0, Some(self.disk_or_server.clone())));
        }
        let (server, named) = find(&self.disk_or_server)?;
        Ok((server, self.disk.clone().or(named)))
    }

    /// The disk that is meant.
    pub fn disk(&self) -> anyhow::Result<Disk> {
        let (server, named) = self.find()?;
        Disk::new(server, named)
    }

    /// The server and the disks that are meant: all of them, unless one was named.
    pub fn disks(&self) -> anyhow::Result<(Client, Vec<Info>)> {
        let (server, named) = self.find()?;
        let Some(name) = named else {
            let all = disks(&server)?;
            return Ok((server, all));
        };
        let disk = Disk { server, name };
        let info = disk.info()?;
        Ok((disk.server, vec![info]))
    }
}
