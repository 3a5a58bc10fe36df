//! One instant for the backups of several disks, which their users and their guest may have to wait for.

use super::agent::{Agent, FrozenGuest};
use super::end;
use crate::target::Disk;
use anyhow::bail;
use fathom_daemon::{BackupInfo, BackupOrder};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Others wait while one begins.
const BEGIN: Duration = Duration::from_secs(30);

/// Begins the backups of these disks, each as its order says, at one instant: after that of all others nothing has been
/// changed in any of them. With a guest agent, what the guest has in its caches is written out before. On an error none
/// of them has begun.
pub fn begin(
    disks: &[&Disk],
    orders: &[BackupOrder],
    agent: Option<&Path>,
) -> anyhow::Result<Vec<BackupInfo>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // What has begun is ended, and a guest is thawed.
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let guest = agent.map(Agent::connect).transpose()?;
    let guest = guest.map(Agent::freeze).transpose()?;
    let begun = begin_together(disks, orders);
    let thawed = guest.map_or(Ok(()), FrozenGuest::thaw);
    match (begun, thawed) {
        (Ok(begun), Ok(())) if !interrupted.load(Ordering::Relaxed) => Ok(begun),
        (Ok(_), thawed) => {
            end_all(disks);
            thawed.and_then(|()| bail!("it was interrupted: there is no backup"))
        }
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(frozen)) => Err(error.context(format!("{frozen:#}"))),
    }
}

fn begin_together(disks: &[&Disk], orders: &[BackupOrder]) -> anyhow::Result<Vec<BackupInfo>> {
    let mut begun = Vec::new();
    for (disk, order) in disks.iter().zip(orders) {
        let order = BackupOrder {
            held: disks.len() > 1,
            ..order.clone()
        };
        let put = disk.server.put(&disk.below("backup")).json(&order);
        match put.within(BEGIN).send() {
            Ok(info) => begun.push(info),
            Err(error) => {
                end_all(&disks[..begun.len()]);
                return Err(error.into());
            }
        }
    }
    if disks.len() > 1 {
        go_on(disks).inspect_err(|_| end_all(disks))?;
    }
    Ok(begun)
}

/// All are held: has their users go on.
fn go_on(disks: &[&Disk]) -> anyhow::Result<()> {
    // (Each of them, whatever becomes of the first.)
    let gone_on = disks.iter().map(|disk| {
        let place = ["v1", "disks", &disk.name, "backup", "go"];
        let info: BackupInfo = disk.server.post(&place).send()?;
        match info.problem {
            Some(problem) => bail!(
                "disk '{}' could not be held for so long: {problem}",
                disk.name
            ),
            None => Ok(()),
        }
    });
    let gone_on: Vec<_> = gone_on.collect();
    gone_on.into_iter().collect()
}

/// They are of no use.
fn end_all(disks: &[&Disk]) {
    for disk in disks {
        let _ = end(disk);
    }
}
