//! One instant for the backups of several disks, which their users and their guest may have to wait for.

use super::agent::{Agent, FrozenGuest};
use super::end;
use crate::target::Disk;
use anyhow::Context;
use fathom_daemon::{BackupInfo, BackupOrder};
use serde_json::{Value, json};
use std::path::Path;

/// They go on by themselves after so long, if nobody is there to say so.
const STILL_MS: u64 = 15_000;

/// Disks that stand still, and go on when this is dropped.
struct Still<'a>(Vec<&'a Disk>);

impl<'a> Still<'a> {
    fn of(disks: &[&'a Disk]) -> anyhow::Result<Still<'a>> {
        let mut still = Still(Vec::new());
        for disk in disks {
            let freeze = disk.server.post(&disk.below("freeze"));
            let frozen = freeze.json(&json!({ "timeout_ms": STILL_MS }));
            frozen.patiently().send::<Value>()?;
            still.0.push(disk);
        }
        Ok(still)
    }

    /// An error: one of them has not stood still until now.
    fn end(mut self) -> anyhow::Result<()> {
        self.thaw()
    }

    fn thaw(&mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        for disk in self.0.drain(..) {
            let thawed = disk.server.post(&disk.below("thaw"));
            let thawed = thawed.patiently().send::<Value>();
            let thawed =
                thawed.with_context(|| format!("disk '{}' did not stand still", disk.name));
            outcome = outcome.and(thawed.map(drop));
        }
        outcome
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        // (What could not be thawed goes on by itself.)
        let _ = self.thaw();
    }
}

/// Begins the backups of these disks, each as its order says, at one instant: after that of all others nothing has been
/// changed in any of them. With a guest agent, what the guest has in its caches is written out before. On an error none
/// of them has begun.
pub fn begin(
    disks: &[&Disk],
    orders: &[BackupOrder],
    agent: Option<&Path>,
) -> anyhow::Result<Vec<BackupInfo>> {
    let guest = agent.map(Agent::connect).transpose()?;
    let guest = guest.map(Agent::freeze).transpose()?;
    let begun = begin_together(disks, orders);
    let thawed = guest.map_or(Ok(()), FrozenGuest::thaw);
    match (begun, thawed) {
        (Ok(begun), Ok(())) => Ok(begun),
        (Err(error), _) => Err(error),
        (Ok(_), Err(error)) => {
            end_all(disks);
            Err(error)
        }
    }
}

fn begin_together(disks: &[&Disk], orders: &[BackupOrder]) -> anyhow::Result<Vec<BackupInfo>> {
    let still = match disks {
        [_] => None,
        several => Some(Still::of(several)?),
    };
    let mut begun = Vec::new();
    for (disk, order) in disks.iter().zip(orders) {
        let put = disk.server.put(&disk.below("backup")).json(order);
        match put.patiently().send() {
            Ok(info) => begun.push(info),
            Err(error) => {
                end_all(&disks[..begun.len()]);
                return Err(error.into());
            }
        }
    }
    let stood = still.map_or(Ok(()), Still::end);
    stood.inspect_err(|_| end_all(disks))?;
    Ok(begun)
}

/// They are of no use.
fn end_all(disks: &[&Disk]) {
    for disk in disks {
        let _ = end(disk);
    }
}
