//! Arguments that select the server and the disk of a command.

use crate::servers::{Shown, disks, find};
use anyhow::bail;
use clap::Args;
use fathom_client::Client;
use fathom_metrics::Info;

/// Arguments that select a server and a disk.
#[derive(Args, Debug)]
pub struct Target {
    /// Name of a disk, or process id or API socket of a server (see `fathom list`)
    #[arg(value_name = "NAME|PID|SOCKET")]
    disk_or_server: String,

    /// Process id or API socket of the disk's server [default: the server that has the disk]
    #[arg(long, value_name = "PID|SOCKET", conflicts_with = "disk")]
    server: Option<String>,

    /// Disk of the server, if the argument is a process id or a socket
    #[arg(long, value_name = "NAME", hide = true)]
    disk: Option<String>,
}

/// A disk of a server.
pub struct Disk {
    pub server: Client,
    pub name: String,
}

impl Disk {
    /// Returns the disk `named` of a server, or the server's only disk.
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

    /// Returns the path of the disk in the API.
    pub fn place(&self) -> [&str; 3] {
        ["v1", "disks", &self.name]
    }

    /// Returns the path of `what`, a resource of the disk, in the API.
    pub fn below<'a>(&'a self, what: &'a str) -> [&'a str; 4] {
        ["v1", "disks", &self.name, what]
    }

    pub fn info(&self) -> anyhow::Result<Info> {
        let shown: Shown = self.server.get(&self.place()).send()?;
        Ok(shown.info())
    }
}

impl Target {
    /// Returns the server, and the name of the disk if the arguments contain one.
    fn find(&self) -> anyhow::Result<(Client, Option<String>)> {
        if let Some(server) = &self.server {
            return Ok((find(server)?.0, Some(self.disk_or_server.clone())));
        }
        let (server, named) = find(&self.disk_or_server)?;
        Ok((server, self.disk.clone().or(named)))
    }

    /// Returns the disk that the arguments select.
    pub fn disk(&self) -> anyhow::Result<Disk> {
        let (server, named) = self.find()?;
        Disk::new(server, named)
    }

    /// Returns the disk that the arguments select, and the server if they name it.
    pub fn disk_and_server(&self) -> anyhow::Result<(Disk, Option<String>)> {
        let (server, named) = self.find()?;
        let is_named = self.server.is_none() && self.disk.is_none() && named.is_some();
        let argument = self.server.as_ref().unwrap_or(&self.disk_or_server);
        let argument = (!is_named).then(|| argument.clone());
        Ok((Disk::new(server, named)?, argument))
    }

    /// Returns the server and the selected disk, or all its disks if no disk is named.
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
