//! `fathom commit`: merges top images into their backing images while the disks are in use.

use crate::img::watch::{WatchArgs, tell_outcome};
use crate::mirror;
use crate::servers::absolute;
use crate::stream;
use crate::target::{Disk, Target};
use clap::Args;
use fathom_metrics::{MirrorInfo, StreamInfo};
use fathom_requests::{CommitOrder, Completion, StreamOrder};
use fathom_units::parse_size;
use std::path::{Path, PathBuf};

/// Merge a disk's top image into its backing image
///
/// The data of the top image is copied to BASE while the disk is in use. Then the disk switches to
/// BASE, and requests wait for some milliseconds. The images above BASE are not needed any more and
/// can be removed. If the commit fails, the disk is unchanged. No other image may have BASE as its
/// backing image.
#[derive(Args, Debug)]
pub struct CommitArgs {
    #[command(flatten)]
    target: Target,

    /// Backing image to write to: an image of the disk's backing chain
    #[arg(value_name = "BASE")]
    base: PathBuf,

    /// Image of the chain to merge, with all images between it and BASE
    ///
    /// [default: the disk's top image] The disk keeps its top image and the others above IMAGE.
    /// `fathom stream show` shows the progress, and `fathom stream stop` cancels the commit.
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["active", "until_ready"])]
    top: Option<PathBuf>,

    /// Limit of the copy in bytes per second, such as 100M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    speed: Option<u64>,

    /// Slow down writes of the guest if the copy cannot keep up with them
    #[arg(long)]
    active: bool,

    /// Return when the data is copied, without switching to BASE
    ///
    /// `fathom mirror complete` then switches to BASE, and `fathom mirror stop` keeps the top
    /// image.
    #[arg(long)]
    until_ready: bool,

    /// Allow a commit of a disk that would have its old image again after a restart
    ///
    /// The image of such a disk is named on the server's command line or in its configuration.
    /// Change it to BASE there before the server restarts.
    #[arg(long = "transient", alias = "unkept")]
    unkept: bool,

    /// Allow a commit of a disk with dirty bitmaps
    ///
    /// The bitmaps stay with the old image, and the next backup must be a full backup.
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
