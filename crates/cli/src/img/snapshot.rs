//! `fathom img snapshot`

use super::image_opts::ImageArg;
use super::{print, print_json};
use clap::Args;
use fathom_img::{self as img, SnapshotChange};

/// List, take, apply and delete internal snapshots of a qcow2 image
#[derive(Debug, Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    action: Action,
    /// With --list: read the image even though another process writes to it
    #[arg(short = 'U', long, conflicts_with_all = ["create", "apply", "delete"])]
    force_share: bool,
    /// Print nothing about a change
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON: the snapshots, or the one that was meant
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
    /// Take a snapshot of that name
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,
    /// Make the disk what it was when that snapshot was taken
    #[arg(short, long, value_name = "NAME|ID")]
    apply: Option<String>,
    /// Delete that snapshot
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
