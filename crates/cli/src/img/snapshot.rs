//! `fathom img snapshot`: manages internal snapshots of an image.

use super::image_opts::ImageArg;
use super::{print, print_json};
use clap::Args;
use fathom_img::{self as img, SnapshotChange};

/// List, take, apply and delete internal snapshots of a qcow2 image
#[derive(Debug, Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    action: Action,
    /// With --list: read the image even if another process writes to it
    #[arg(short = 'U', long, conflicts_with_all = ["create", "apply", "delete"])]
    force_share: bool,
    /// Print nothing about changes
    #[arg(short, long)]
    quiet: bool,
    /// Print the snapshots, or the selected snapshot, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageArg,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct Action {
    /// List the snapshots (the default)
    #[arg(short, long)]
    list: bool,
    /// Take a snapshot with this name
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,
    /// Return the disk to this snapshot; later writes are lost
    #[arg(short, long, value_name = "NAME|ID")]
    apply: Option<String>,
    /// Delete this snapshot
    #[arg(short, long, value_name = "NAME|ID")]
    delete: Option<String>,
}

impl Action {
    fn change(&self) -> Option<SnapshotChange> {
        let of = |change: fn(String) -> SnapshotChange, name: &Option<String>| {
            name.as_ref().map(|name| change(name.clone()))
        };
        of(SnapshotChange::Create, &self.create)
            .or_else(|| of(SnapshotChange::Apply, &self.apply))
            .or_else(|| of(SnapshotChange::Delete, &self.delete))
    }
}

pub(super) fn run(args: &SnapshotArgs) -> anyhow::Result<()> {
    let (file, format) = (&args.image.file, args.image.format);
    let Some(change) = args.action.change() else {
        let all = img::snapshots(file, format, args.force_share)?;
        return match args.json {
            true => print_json(&all.to_json()),
            false => print(all),
        };
    };
    let changed = img::change_snapshots(file, format, &change)?;
    match args.json && !args.quiet {
        true => print_json(&changed.to_json()[0]),
        false => Ok(()),
    }
}
