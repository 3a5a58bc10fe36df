//! Begins the backups of several disks at one instant, for which guests may have to wait.

use super::agent::{Agent, FrozenGuest};
use super::end;
use crate::target::Disk;
use anyhow::{anyhow, bail};
use fathom_client::ClientError;
use fathom_metrics::BackupInfo;
use fathom_requests::{BackupOrder, new_identity};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Timeout for a backup to begin. Meanwhile, requests to the other disks may wait.
const BEGIN: Duration = Duration::from_secs(30);

/// Begins the backups of these disks, each with its order, at one instant.
///
/// When the last backup has begun, no disk has been changed since its own backup began. With a
/// guest agent, the guest flushes its caches first. After an error, no backup exists, unless the
/// error says that one may still start.
pub fn begin(
    disks: &[&Disk],
    orders: &[BackupOrder],
    agent: Option<&Path>,
) -> anyhow::Result<Vec<BackupInfo>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // After a signal, the backups are ended and the guest is thawed.
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let guest = agent.map(Agent::connect).transpose()?;
    let guest = guest.map(Agent::freeze).transpose()?;
    let begun = begin_together(disks, orders);
    let thawed = guest.map_or(Ok(()), FrozenGuest::thaw);
    match (begun, thawed) {
        (Ok(begun), Ok(())) if !interrupted.load(Ordering::Relaxed) => Ok(begun),
        (Ok(begun), thawed) => {
            end_all(disks, &begun);
            thawed.and_then(|()| bail!("interrupted; no backup exists"))
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
        match begin_one(disk, &order) {
            Ok(info) => begun.push(info),
            Err(error) => {
                end_all(disks, &begun);
                return Err(error);
            }
        }
    }
    if disks.len() > 1 {
        go_on(disks, &begun).inspect_err(|_| end_all(disks, &begun))?;
    }
    Ok(begun)
}

/// Begins the backup of a disk, and cancels it if the server does not reply in time.
///
/// After an error no backup exists, unless the error says that it may still start.
fn begin_one(disk: &Disk, order: &BackupOrder) -> anyhow::Result<BackupInfo> {
    let id = new_identity();
    let put = disk.server.put(&disk.below("backup")).parameter("id", &id);
    let error = match put.json(order).within(BEGIN).send() {
        Ok(info) => return Ok(info),
        Err(error) => error,
    };
    if may_yet_begin(&error) {
        let delete = disk.server.delete(&disk.below("backup"));
        let ended = delete
            .parameter("id", &id)
            .within(BEGIN)
            .send::<BackupInfo>();
        let is_unknown = match ended {
            // Any reply to this request means that the backup cannot begin any more.
            Ok(_) | Err(ClientError::Refused { .. }) => false,
            Err(error) => !error.is_gone(),
        };
        if is_unknown {
            let stop = format!("`fathom backup stop {} --id {id}`", disk.name);
            return Err(anyhow!(error).context(format!(
                "the backup of disk '{}' may still start; stop it with {stop}",
                disk.name
            )));
        }
    }
    Err(error.into())
}

/// Whether the server may still carry out a request that has failed with this error.
fn may_yet_begin(error: &ClientError) -> bool {
    const GATEWAY_TIMEOUT: u16 = 504;
    match error {
        ClientError::Refused { status, .. } => *status == GATEWAY_TIMEOUT,
        ClientError::NotRunning(_) => false,
        _ => true,
    }
}

/// Resumes writes to all disks, which the backups hold.
fn go_on(disks: &[&Disk], begun: &[BackupInfo]) -> anyhow::Result<()> {
    // All disks are resumed, even if one of them fails.
    let gone_on = disks.iter().zip(begun).map(|(disk, info)| {
        let place = ["v1", "disks", &disk.name, "backup", "go"];
        let go = disk.server.post(&place).parameter("id", &info.id);
        let info: BackupInfo = go.send()?;
        match info.problem {
            Some(problem) => bail!(
                "disk '{}': cannot pause its writes until all backups have started: {problem}",
                disk.name
            ),
            None => Ok(()),
        }
    });
    let gone_on: Vec<_> = gone_on.collect();
    gone_on.into_iter().collect()
}

/// Ends backups that are useless because another one failed.
fn end_all(disks: &[&Disk], begun: &[BackupInfo]) {
    for (disk, info) in disks.iter().zip(begun) {
        let _ = end(disk, &info.id);
    }
}
