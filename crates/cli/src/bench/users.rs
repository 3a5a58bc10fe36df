//! Who uses the export of a server that a load is about to write to.

use anyhow::bail;
use fathom_daemon::control::{Client, ClientError, Info, Request, default_path};
use fathom_load::{Nbd, server_pid};
use serde::Deserialize;

/// Fails when the disk has other users. That is known of a Fathom on this host
/// whose control socket is at its usual place and may be used by this user;
/// others are not asked.
pub fn refuse(server: &Nbd) -> anyhow::Result<()> {
    let disk = server_pid(server)
        .and_then(default_path)
        .and_then(|path| Client::connect(&path).ok())
        .and_then(|mut client| disk_of(&mut client, server).ok().flatten());
    let users = disk.as_ref().map(users_of).unwrap_or_default();
    if !users.is_empty() {
        bail!(
            "the disk is in use by {}; --rw would overwrite their data: if it may, pass --overwrite",
            users.join(", ")
        );
    }
    Ok(())
}

/// The disk that is exported, of those that the server has.
fn disk_of(client: &mut Client, server: &Nbd) -> Result<Option<Info>, ClientError> {
    #[derive(Deserialize)]
    struct Names {
        disks: Vec<String>,
    }
    let Names { disks } = client.ask(&Request::Disks)?;
    for name in &disks {
        let info: Info = client.ask_about(Some(name), &Request::Info)?;
        let wanted = server.uri.export();
        // Who names none gets the first.
        let is_it = |export: &str| wanted.is_empty() || export == wanted;
        if info.nbd.as_ref().is_some_and(|nbd| is_it(&nbd.export)) {
            return Ok(Some(info));
        }
    }
    Ok(None)
}

fn users_of(disk: &Info) -> Vec<String> {
    let front_end = disk.front_end.iter();
    let front_end = front_end.map(|f| format!("a virtual machine (process {})", f.pid));
    let clients = disk.nbd.iter().flat_map(|nbd| &nbd.connections);
    let clients = clients.map(|c| format!("an NBD client ({})", c.client));
    front_end.chain(clients).collect()
}
