//! `fathom snapshot`: takes snapshots of disks, as a new overlay or inside the image.

use crate::servers::absolute;
use crate::target::{Disk, Target};
use clap::Args;
use fathom_metrics::{SnapshotInfo, Snapshots};
use fathom_requests::SnapshotOrder;
use fathom_units::{Size, Utc};
use std::io::Write;
use std::path::PathBuf;

/// Take a snapshot of a disk while it is in use
///
/// The command creates FILE, a qcow2 image on top of the disk's image. From then on the disk writes
/// to FILE, and the old image stays as it was and can be copied. Do not write to the old image
/// while FILE exists. `fathom commit` merges both images again. Requests wait for some
/// milliseconds.
///
/// With --internal the snapshot is stored in the disk's own qcow2 image. Requests wait until the
/// tables of the image are written, which takes longer for large images.
/// `fathom img snapshot --apply` restores the snapshot while the image is not in use.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    action: Action,

    /// Allow a snapshot of a disk that would have its old image again after a restart
    ///
    /// The image of such a disk is named on the server's command line or in its configuration.
    /// Change it to FILE there before the server restarts.
    #[arg(long = "transient", alias = "unkept", conflicts_with_all = ["internal", "list", "delete"])]
    unkept: bool,

    /// Allow a snapshot of a disk with dirty bitmaps
    ///
    /// The bitmaps stay with the old image, and the next backup must be a full backup.
    #[arg(long, conflicts_with_all = ["internal", "list", "delete"])]
    leave_bitmaps: bool,

    /// Print the list of --list as JSON
    #[arg(long, conflicts_with = "file")]
    json: bool,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Action {
    /// New qcow2 image on top of the disk's image
    ///
    /// The new image names the old one by its file name if both are in the same directory,
    /// otherwise by its path.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Store a snapshot of this name in the disk's own image
    #[arg(long, value_name = "NAME")]
    internal: Option<String>,

    /// List the snapshots in the disk's own image
    #[arg(short, long)]
    list: bool,

    /// Delete a snapshot in the disk's own image
    #[arg(short, long, value_name = "NAME|ID")]
    delete: Option<String>,
}

pub fn run(args: &SnapshotArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let action = &args.action;
    let found = if let Some(file) = &action.file {
        let order = SnapshotOrder {
            overlay: absolute(file)?,
            unkept: args.unkept,
            leave_bitmaps: args.leave_bitmaps,
        };
        let post = disk.server.post(&disk.below("snapshot")).json(&order);
        warn_if_unmarked(&post.patiently().send::<serde_json::Value>()?);
        return Ok(());
    } else if let Some(name) = &action.internal {
        disk.server.put(&one(&disk, name))
    } else if let Some(which) = &action.delete {
        disk.server.delete(&one(&disk, which))
    } else {
        disk.server.get(&disk.below("snapshots"))
    };
    let Snapshots { snapshots } = found.patiently().send()?;
    match (args.json, action.list) {
        (true, _) => {
            let json = serde_json::to_string(&snapshots)?;
            Ok(writeln!(std::io::stdout(), "{json}")?)
        }
        (false, true) => tell(&snapshots),
        (false, false) => Ok(()),
    }
}

/// Warns if the old image could not be marked. `disk` is the server's reply to a switch of images.
pub fn warn_if_unmarked(disk: &serde_json::Value) {
    if let Some(problem) = disk["state"]["unmarked"].as_str() {
        eprintln!(
            "warning: the old image of the disk is not marked as superseded: {problem}; make sure that no program \
             writes to it"
        );
    }
}

fn one<'a>(disk: &'a Disk, name: &'a str) -> [&'a str; 5] {
    ["v1", "disks", &disk.name, "snapshots", name]
}

fn tell(snapshots: &[SnapshotInfo]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for snapshot in snapshots {
        let SnapshotInfo {
            id,
            name,
            taken,
            vm_state,
            ..
        } = snapshot;
        let taken = Utc::from_seconds(taken / 1_000_000_000);
        let vm_state = match vm_state {
            0 => String::new(),
            bytes => format!(", with {} of its virtual machine's state", Size(*bytes)),
        };
        writeln!(out, "{id}: {name}, taken {taken} UTC{vm_state}")?;
    }
    Ok(())
}
