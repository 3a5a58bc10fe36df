//! `fathom img commit`

use super::common::{DataFileArg, KeysArg, RateArg};
use super::image_opts::ImageArg;
use super::watch::{WatchArgs, watched};
use super::{parse_cache, print};
use clap::Args;
use fathom_img::{self as img, CommitOptions};
use fathom_storage::Cache;
use std::path::PathBuf;

/// Write what an image holds into its backing file
#[derive(Debug, Args)]
pub(super) struct CommitArgs {
    /// The image of the chain to write to, instead of the one right below (implies --drop); a
    /// relative name is seen from the image above it
    #[arg(short, long, value_name = "PATH")]
    base: Option<PathBuf>,
    /// Leave in the image what is in it: it is going to be dropped
    #[arg(short, long)]
    drop: bool,
    #[command(flatten)]
    rate: RateArg,
    /// How the images are read and written: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    /// Directory in which an image may name its files, besides its own
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    #[command(flatten)]
    data_file: DataFileArg,
    #[command(flatten)]
    keys: KeysArg,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    image: ImageArg,
}

pub(super) fn run(args: CommitArgs) -> anyhow::Result<()> {
    let options = CommitOptions {
        format: args.image.format,
        keep: args.drop || args.base.is_some(),
        base: args.base,
        rate: args.rate.rate,
        cache: args.cache,
        allow_dirs: args.allow_dir,
        data_file: args.data_file.data_file,
        keys: args.keys.and(args.image.keys).ring(),
    };
    watched(&args.watch, |progress| {
        img::commit(&args.image.file, &options, progress)
    })?;
    match args.watch.quiet() || args.watch.json() {
        true => Ok(()),
        false => print("Image committed.\n"),
    }
}
