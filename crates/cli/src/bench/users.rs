//! Finds other users of an NBD export, before a load writes to it.

use crate::servers::disks;
use anyhow::bail;
use fathom_client::{Client, place};
use fathom_load::{Nbd, server_pid};
use fathom_metrics::Info;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time for an earlier client, such as a previous load, to disappear from the list of users.
const LEAVING: Duration = Duration::from_secs(1);

/// Fails if the disk has other users.
///
/// Only a Fathom server on this host whose API this user can access reports its users. Other
/// servers are not checked.
pub fn refuse(server: &Nbd) -> anyhow::Result<()> {
    let client = server_pid(server)
        .and_then(place::entry_of)
        .and_then(|path| Client::connect(&path).ok());
    let users = || {
        let disk = client.as_ref().and_then(|client| disk_of(client, server));
        disk.as_ref().map(users_of).unwrap_or_default()
    };
    let begun = Instant::now();
    let mut found = users();
    while !found.is_empty() && begun.elapsed() < LEAVING {
        sleep(Duration::from_millis(20));
        found = users();
    }
    if !found.is_empty() {
        bail!(
            "the disk is in use by {}; --rw would overwrite their data: if it may, pass --overwrite",
            found.join(", ")
        );
    }
    Ok(())
}

/// Returns the server's disk with the export.
fn disk_of(client: &Client, server: &Nbd) -> Option<Info> {
    let wanted = server.uri.export();
    // A client without an export name gets the first disk.
    let is_it = |export: &str| wanted.is_empty() || export == wanted;
    let is_it = |disk: &Info| disk.nbd.as_ref().is_some_and(|nbd| is_it(&nbd.export));
    disks(client).ok()?.into_iter().find(is_it)
}

fn users_of(disk: &Info) -> Vec<String> {
    let front_end = disk.front_end.iter();
    let front_end = front_end.map(|f| format!("a virtual machine (process {})", f.pid));
    let clients = disk.nbd.iter().flat_map(|nbd| &nbd.connections);
    let clients = clients.map(|c| format!("an NBD client ({})", c.client));
    front_end.chain(clients).collect()
}
