//! `fathom snapshot`: disks that go on with new images on top of their own.

use crate::servers::absolute;
use crate::target::Target;
use clap::Args;
use fathom_daemon::SnapshotOrder;
use std::path::PathBuf;

/// Keep a disk as it is now in its image, and have it go on with a new one on top
///
/// Its users wait for some milliseconds. FILE is made: a qcow2 image that has what is changed from now on. The image that
/// the disk has had stays as it is, and can be copied at leisure; nothing may be written to it as long as there is
/// something on top of it. `fathom mirror` makes one image of them again.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    #[command(flatten)]
    target: Target,

    /// The image to make; it finds the other one by its name if they are in one directory, else by its path
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Even if the server would have the old image again when it starts again, since that is said on its command line or
    /// in its configuration: change it there before that
    #[arg(long)]
    unkept: bool,
}

pub fn run(args: &SnapshotArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let order = SnapshotOrder {
        overlay: absolute(&args.file)?,
        unkept: args.unkept,
    };
    let post = disk.server.post(&disk.below("snapshot")).json(&order);
    post.patiently().send::<serde_json::Value>()?;
    Ok(())
}
