//! `fathom commit`: disks that are brought into the images below their own.

use crate::img::watch::{WatchArgs, tell_outcome};
use crate::mirror;
use crate::servers::absolute;
use crate::stream;
use crate::target::{Disk, Target};
use clap::Args;
use fathom_daemon::{CommitOrder, Completion, MirrorInfo, StreamInfo, StreamOrder};
use fathom_units::parse_size;
use std::path::{Path, PathBuf};

/// Bring what a disk has into the image below its own while it is used, and have it go on with that
///
/// It is a mirror whose target is that image, which changes only where the ones above hide it: until the end, and whatever
/// goes wrong, the disk is the same. Then its users wait for some milliseconds, and it has one image less, or several, which
/// are nobody's: remove them. Nothing else may be above the image that is written to.
#[derive(Args, Debug)]
pub struct CommitArgs {
    #[command(flatten)]
    target: Target,

    /// The image of the chain to write to: the one right below, or one further down
    #[arg(value_name = "BASE")]
    base: PathBuf,

    /// Bring only this image of the chain into the base, and those between the two; the disk keeps its own, and others above
    /// it. `fathom stream show` tells how far it is, and `fathom stream stop` ends it
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["active", "until_ready"])]
    top: Option<PathBuf>,

    /// Bytes a second [default: as many as there can be]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    speed: Option<u64>,

    /// Once all has been copied, let users change no more than is copied meanwhile: for disks that are changed faster
    /// than that
    #[arg(long)]
    active: bool,

    /// Return when it is ready: `fathom mirror complete` has the disk go on with the image below, `fathom mirror stop`
    /// with the one that it has
    #[arg(long)]
    until_ready: bool,

    /// Even if the image is said on the server's command line or in its configuration: see to it that, whenever it starts
    /// again, it has the disk's image and none of those that are written to or go
    #[arg(long)]
    unkept: bool,

    /// Even if the disk has dirty bitmaps: they stay with its old image, and the next backup is a full one
    #[arg(long, conflicts_with_all = ["top", "until_ready"])]
    leave_bitmaps: bool,

    #[command(flatten)]
    watch: WatchArgs,
}

pub fn run(args: CommitArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let outcome = match &args.top {
        Some(top) => commit_middle(&disk, top, &args),
        None => commit(&disk, &args),
    };
    tell_outcome(
        &args.watch,
        outcome.as_ref().map(|()| serde_json::json!({})),
    );
    outcome
}

fn commit(disk: &Disk, args: &CommitArgs) -> anyhow::Result<()> {
    let order = CommitOrder {
        base: absolute(&args.base)?,
        speed: args.speed,
        active: args.active,
        unkept: args.unkept,
    };
    let begin = disk.server.post(&disk.below("commit")).json(&order);
    begin.patiently().send::<MirrorInfo>()?;
    match args.until_ready {
        true => mirror::wait(disk, &args.watch).map(drop),
        false => {
            let how = Completion {
                unkept: args.unkept,
                leave_bitmaps: args.leave_bitmaps,
            };
            mirror::wait_and_complete(disk, &how, &args.watch)
        }
    }
}

fn commit_middle(disk: &Disk, top: &Path, args: &CommitArgs) -> anyhow::Result<()> {
    let order = StreamOrder {
        base: Some(absolute(&args.base)?),
        top: Some(absolute(top)?),
        speed: args.speed,
        ..StreamOrder::default()
    };
    let put = disk.server.put(&disk.below("stream")).json(&order);
    put.patiently().send::<StreamInfo>()?;
    stream::wait(disk, &args.watch).map(drop)
}
