//! `fathom snapshot`: disks that are kept as they are now, in a new image or in their own.

use crate::servers::absolute;
use crate::target::{Disk, Target};
use clap::Args;
use fathom_daemon::{SnapshotInfo, SnapshotOrder, Snapshots};
use fathom_units::{Size, Utc};
use std::io::Write;
use std::path::PathBuf;

/// Keep a disk as it is now, and have it go on: with a new image on top, or in its own
///
/// Its users wait for some milliseconds. FILE is made: a qcow2 image that has what is changed from now on. The image that
/// the disk has had stays as it is, and can be copied at leisure; nothing may be written to it as long as there is
/// something on top of it. `fathom commit` makes one image of them again.
///
/// With --internal a qcow2 image keeps the disk in itself. Users wait until its tables have been written: longer for images
/// of many clusters. `fathom img snapshot --apply` goes back to it, when nobody uses the image.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    action: Action,

    /// Even if the server would have the old image again when it starts again, since that is said on its command line or
    /// in its configuration: change it there before that
    #[arg(long, conflicts_with_all = ["internal", "list", "delete"])]
    unkept: bool,

    /// Even if the disk has dirty bitmaps: they stay with the image that it has now, and the next backup is a full one
    #[arg(long, conflicts_with_all = ["internal", "list", "delete"])]
    leave_bitmaps: bool,

    /// With --list: print JSON
    #[arg(long, conflicts_with = "file")]
    json: bool,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Action {
    /// The image to make; it finds the other one by its name if they are in one directory, else by its path
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Keep the disk in its own image, under that name
    #[arg(long, value_name = "NAME")]
    internal: Option<String>,

    /// List what its image has kept so
    #[arg(short, long)]
    list: bool,

    /// Delete that one
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

/// `disk`: how the server shows a disk that it has switched to another image.
pub fn warn_if_unmarked(disk: &serde_json::Value) {
    if let Some(problem) = disk["state"]["unmarked"].as_str() {
        eprintln!(
            "warning: the image that the disk had is not marked as superseded: {problem}; make sure that nobody writes \
             to it"
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
